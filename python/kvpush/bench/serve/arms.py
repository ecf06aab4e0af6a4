"""What `kvpush bench serve` compares, and how each connector is driven.

All arms run the same vLLM engines with the same options; they differ in the connector and in what its
own documentation and demo proxies prescribe:

- ``kvpush-TRANSPORT``: both legs are sent at once, as `kvpush router` does, with one ``transfer_id``.
- ``nixl-push`` (vLLM's NixlPushConnector): both legs at once with the same request id, P's identity known
  beforehand, as vLLM's demo proxy for it does: D registers its blocks while P computes.
- ``nixl-pull`` (vLLM's NixlPullConnector, alias NixlConnector): P's leg first; D's leg is sent with the
  ``kv_transfer_params`` of P's answer, as vLLM's demo proxy for it does. The way from P's answer to D is
  one pipe here, less than a proxy's HTTP.
- ``nixl-push-slow``, ``nixl-pull-slow``: the same with two changes that vLLM has no option for. NIXL's UCX
  progress thread, which as shipped polls without a pause, pauses 1 ms between polls; and the engine's
  threads return to the cores they were given, from which vLLM's NIXL worker moves them to the machine's
  last core. On machines with few cores this is the better NIXL; as shipped is what a user gets.

The prepared descriptor lists, the writer thread and UCX (4 threads) are vLLM's own defaults.
"""

from dataclasses import dataclass
from typing import Any

P_ENGINE = "bench-prefill"
D_ENGINE = "bench-decode"
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Arm:
    """One connector, one way to run it. ``sequential``: D's leg waits for P's answer."""

    name: str
    connector: str
    transport: str = ""
    sequential: bool = False
    slow_progress: bool = False

    @property
    def is_kvpush(self) -> bool:
        """Whether this is ours: the other arms' ratios are to the first of these."""
        return self.connector == "KVPushConnector"

    def transfer_config(self, role: str, port: int) -> dict[str, Any]:
        """Return vLLM's KVTransferConfig arguments; ``role`` is "kv_producer" or "kv_consumer"."""
        extra = {"transport": self.transport, "side_channel_host": HOST, "side_channel_port": port}
        return {
            "kv_connector": self.connector,
            "kv_role": role,
            "engine_id": P_ENGINE if role == "kv_producer" else D_ENGINE,
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": extra if self.is_kvpush else {},
        }

    def prefill_params(self, request: str) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` of P's leg."""
        own = {"transfer_id": request} if self.is_kvpush else {}
        return own | {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }

    def decode_params(self, request: str, p_port: int) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` of D's leg where it does not wait for P's answer."""
        own = {"transfer_id": request} if self.is_kvpush else {}
        return own | {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": P_ENGINE,
            "remote_host": HOST,
            "remote_port": p_port,
            "tp_size": 1,
            "pp_size": 1,
            "remote_request_id": request,
        }


ARMS = {
    arm.name: arm
    for arm in (
        Arm("kvpush-shm", "KVPushConnector", transport="shm"),
        Arm("kvpush-nixl", "KVPushConnector", transport="nixl"),
        Arm("nixl-push", "NixlPushConnector"),
        Arm("nixl-push-slow", "NixlPushConnector", slow_progress=True),
        Arm("nixl-pull", "NixlPullConnector", sequential=True),
        Arm("nixl-pull-slow", "NixlPullConnector", sequential=True, slow_progress=True),
    )
}
DEFAULT_ARMS = ("kvpush-shm", "nixl-push", "nixl-push-slow", "nixl-pull", "nixl-pull-slow")


@dataclass(frozen=True)
class Moved:
    """What one request moved, as the connectors' own statistics have it."""

    transfers: int
    bytes: int
    network_ops: int
    failures: int


def moved(arm: Arm, prefill: dict[str, Any], decode: dict[str, Any]) -> Moved:
    """Read the statistics of both engines since the request before; names are the connectors'."""
    if arm.is_kvpush:
        failures = sum(sum(side.get("failures", {}).values()) for side in (prefill, decode))
        return Moved(
            int(decode.get("received", 0)),
            int(decode.get("bytes_received", 0)),
            int(prefill.get("network_ops", 0)),
            failures + sum(decode.get("skipped", {}).values()),
        )
    both = [prefill, decode]  # a push is counted on P, a pull on D
    sizes = [size for side in both for size in side.get("bytes_transferred", ())]
    failing = (
        "num_failed_transfers",
        "num_failed_notifications",
        "num_failed_handshakes",
        "num_kv_expired_reqs",
        "num_notifications_after_expiry",
    )
    return Moved(
        len(sizes),
        int(sum(sizes)),
        int(sum(sum(side.get("num_descriptors", ())) for side in both)),
        sum(len(side.get(name, ())) for side in both for name in failing),
    )

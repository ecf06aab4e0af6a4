"""D's half of the worker: one entry per request that wants KV, from its claim to its one report."""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger

from kvpush.errors import PeerLost, QueueFull
from kvpush.vllm.handshake import Address, Handshakes, Outcome
from kvpush.vllm.launched import Launched
from kvpush.vllm.layout import CacheSpec
from kvpush.vllm.metadata import Fetch, Intent
from kvpush.vllm.metrics import KVPushStats
from kvpush.vllm.params import Remote
from kvpush.vllm.pushes import error_code
from kvpush.vllm.trace import Trace, event_fields

logger = init_logger("vllm." + __name__)

MAX_ATTEMPTS = 3
"""Sessions tried for one request before it fails."""


@dataclass(eq=False)
class Load:
    """One request. ``fetch`` is set once vLLM waits for it; then it is reported exactly once."""

    req_id: str
    key: str
    remote: Remote
    known_at: float
    fetch: Fetch | None = None
    claim: Any = None
    peer: str = ""
    recv: Any = None
    attempts: int = 0
    gone: bool = False
    cancelled: bool = False
    started_at: float = 0.0
    started_mono: float = 0.0
    expected_bytes: int = 0
    num_units: int = 0

    @property
    def address(self) -> Address:
        """Where its prefill engine answers."""
        return (self.remote.host, self.remote.port)


class Loads:
    """All loads of one worker. Not thread-safe; no method raises for a request's sake."""

    def __init__(
        self,
        engine: Any,
        handshakes: Handshakes,
        spec: CacheSpec,
        launched: Launched,
        stats: KVPushStats,
        trace: Trace,
    ) -> None:
        self._engine = engine
        self._handshakes = handshakes
        self._spec = spec
        self._launched = launched
        self._stats = stats
        self._trace = trace
        self._by_id: dict[str, Load] = {}
        self._by_handle: dict[int, Load] = {}
        self._parked: dict[Address, list[Load]] = {}
        self._full: deque[Load] = deque()
        self._finished: set[str] = set()
        self._failed: set[str] = set()

    def __len__(self) -> int:
        return sum(1 for load in self._by_id.values() if load.fetch is not None)

    # ---- orders --------------------------------------------------------------------------------

    def intent(self, order: Intent) -> None:
        """Claim the key of a request that will come, as soon as there is a session."""
        load = Load(order.req_id, order.key, order.remote, time.time())
        self._by_id[order.req_id] = load
        self._proceed(load)

    def fetch(self, order: Fetch) -> None:
        """Receive: vLLM waits for this request from now on."""
        load = self._by_id.get(order.req_id)
        if load is None:
            remote = order.remote or Remote("", 0, "")
            load = self._by_id[order.req_id] = Load(order.req_id, order.key, remote, time.time())
        load.fetch = order
        load.attempts = 0
        load.started_at, load.started_mono = time.time(), time.monotonic()
        for group, ids in zip(self._spec.groups, order.blocks, strict=True):
            count = len(ids) - ids.count(-1)
            load.expected_bytes += count * group.unit_bytes
            load.num_units += count * len(group.planes)
        if order.error is not None:
            self._fail(load, "bad_params", order.error)
        else:
            self._proceed(load)

    def knows(self, req_id: str) -> bool:
        """Whether this request is open here."""
        return req_id in self._by_id

    def cancel(self, req_id: str) -> None:
        """End a request at once; one that was reported already is ignored."""
        load = self._by_id.get(req_id)
        if load is None:
            return
        load.cancelled = True
        if load.recv is not None:
            load.recv.cancel()  # reported with its terminal event, when no unpack runs any more
            return
        self._stats.label("skipped", "cancelled")
        parked = self._parked.get(load.address, [])
        if load.claim is not None:
            load.claim.cancel()
        elif load in parked and self._handshakes.withdraw(load.address, load.key):
            parked.remove(load)
        else:
            load.gone = True  # the claim is made and withdrawn when the hand-shake's end is seen
        self._report(load)

    # ---- progress ------------------------------------------------------------------------------

    def _proceed(self, load: Load) -> None:
        peer = self._handshakes.peer(load.address)
        try:
            if peer is None:
                self._park(load)
                return
            if load.claim is None:
                load.claim, load.peer = self._engine.expect(peer, load.key), peer
            if load.gone:
                load.claim.cancel()
            elif load.fetch is not None and load.recv is None:
                order = load.fetch
                # A forward that still runs may read what these blocks held before.
                load.recv = load.claim.receive(
                    digest=order.digest,
                    blocks=order.blocks,
                    first=order.first,
                    after=self._launched.so_far(),
                )
                self._by_handle[load.recv.handle] = load
        except PeerLost as error:
            self._handshakes.lost(peer or "")
            load.claim = None
            load.attempts += 1
            if load.attempts < MAX_ATTEMPTS:
                self._proceed(load)
            else:
                self._fail(load, "peer_lost", str(error))
        except QueueFull:
            self._full.append(load)
        except Exception as error:
            self._fail(load, error_code(error), str(error))

    def _park(self, load: Load) -> None:
        parked = self._parked.setdefault(load.address, [])
        if load not in parked:
            parked.append(load)
        self._handshakes.start(load.remote)

    def pump(self) -> None:
        """Go on with requests whose hand-shake ended, and with those that met a full queue."""
        for outcome in self._handshakes.poll():
            self._on_handshake(outcome)
        for _ in range(len(self._full)):
            load = self._full.popleft()
            if load.gone or self._by_id.get(load.req_id) is load:
                self._proceed(load)

    def _on_handshake(self, outcome: Outcome) -> None:
        if outcome.peer is not None:
            self._stats.count("handshakes")
            self._stats.observe("handshake_seconds", outcome.seconds)
        else:
            logger.warning("kvpush: %s", outcome.error)
            self._stats.label("failures", "handshake")
        for load in self._parked.pop(outcome.address, []):
            if outcome.peer is not None:
                self._proceed(load)
            elif load.fetch is not None and not load.gone:
                self._fail(load, "handshake_failed", outcome.error)

    def on_lost(self, peer: str) -> None:
        """Forget a session; claims without a receive are made anew when their request comes."""
        self._stats.count("sessions_lost")
        self._handshakes.lost(peer)
        for load in self._by_id.values():
            if load.peer == peer and load.recv is None:
                load.claim = None

    # ---- ends ----------------------------------------------------------------------------------

    def on_event(self, event: Any) -> None:
        """Take the engine's terminal event of a receive."""
        load = self._by_handle.pop(event.handle, None)
        if load is None:
            return
        self._stats.count("boxes", event.boxes)
        self._stats.count("bytes_received", event.bytes)
        for stage, us in event.timings.items():
            self._stats.label("stage_us", stage.removesuffix("_us"), us)
        self._record(load, event_fields(event))
        if event.kind == "received":
            self._received(load, event)
        elif load.cancelled:
            self._stats.label("skipped", "cancelled")
            self._report(load)
        else:
            self._fail(load, event.status, event.detail, event.bytes)

    def _record(self, load: Load, fields: dict[str, Any]) -> None:
        self._trace.write(
            side="receive",
            request_id=load.req_id,
            per_block_descriptors=load.num_units,
            bytes_expected=load.expected_bytes,
            known_at=load.known_at,
            started_at=load.started_at,
            ended_at=time.time(),
            **fields,
        )

    def _received(self, load: Load, event: Any) -> None:
        self._stats.count("received")
        self._stats.count("bytes_expected", load.expected_bytes)
        self._stats.observe("receive_seconds", time.monotonic() - load.started_mono)
        if event.bytes != load.expected_bytes:
            logger.warning(
                "kvpush: request %s (key %s): %d bytes moved, %d were expected",
                load.req_id,
                load.key,
                event.bytes,
                load.expected_bytes,
            )
        self._report(load)

    def _fail(self, load: Load, code: str, detail: str, moved_bytes: int = 0) -> None:
        if load.fetch is None or load.gone:
            load.claim = None  # nothing was promised: tried anew when vLLM waits for it
            logger.info("kvpush: claim of request %s (key %s): %s %s", load.req_id, load.key, code, detail)
            return
        self._stats.label("failures", code or "unknown")
        self._stats.count("bytes_expected", load.expected_bytes)
        logger.warning(
            "kvpush: receive of request %s (key %s) failed: %s: %s; %d of %d bytes moved",
            load.req_id,
            load.key,
            code,
            detail,
            moved_bytes,
            load.expected_bytes,
        )
        if load.recv is None:
            # No receive was begun, so there is no event of the engine to record.
            ended = {"kind": "failed", "key": load.key, "status": code, "detail": detail}
            self._record(load, ended | {"bytes": 0, "boxes": 0, "timings": {}})
        if not load.cancelled:
            self._failed.add(load.req_id)
        self._report(load)

    def _report(self, load: Load) -> None:
        """End a load, here and nowhere else; vLLM hears of it only if it was promised."""
        if self._by_id.get(load.req_id) is not load:
            return
        del self._by_id[load.req_id]
        if load.fetch is not None:
            self._finished.add(load.req_id)

    def take_results(self) -> tuple[set[str], set[str]]:
        """(finished_recving, failed_recving): each id once; a failed one is in both."""
        results = self._finished, self._failed
        self._finished, self._failed = set(), set()
        return results

    def fail_all(self, code: str, detail: str) -> None:
        """End every load: the engine is gone."""
        self._by_handle.clear()
        self._parked.clear()
        self._full.clear()
        for load in list(self._by_id.values()):
            load.recv = load.claim = None
            if load.fetch is None:
                self._report(load)
            else:
                self._fail(load, code, detail)

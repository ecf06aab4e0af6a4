"""Prefill and decode engines of one test run, and one engine alone to compare with."""

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
from nodes import Node, Nursery
from tiny import free_port, make_model, prompt

import kvpush

# Two slots of four units: a prompt of some length takes each of them many times.
SETTINGS = {
    "num_slots": 2,
    "slot_bytes": 1 << 16,
    "peer_timeout_s": 2.0,
    "pairing_timeout_s": 2.0,
    "unclaimed_timeout_s": 2.0,
}
LONG = prompt(700, 3)
WAITING = "WAITING_FOR_REMOTE_KVS"
both_transports = pytest.mark.parametrize(
    "pair", ["shm", pytest.param("nixl", marks=pytest.mark.nixl)], indirect=True
)


class Fleet:
    """All engines of a test run; a pair is started when a test first asks for its transport."""

    def __init__(self, folder: Path) -> None:
        self.model = make_model(folder / "model")
        self.nursery = Nursery(folder)
        self.numbers = itertools.count()
        self.alone = self.nursery.start(self.model, None, enable_prefix_caching=False)
        self.pairs: dict[str, Pair] = {}

    def pair(self, transport: str) -> "Pair":
        reason = kvpush.transports().get(transport, "unknown")
        if reason:
            pytest.skip(f"{transport}: {reason}")
        if transport not in self.pairs:
            self.pairs[transport] = Pair(self, transport)
        return self.pairs[transport]

    def drop(self, pair: "Pair") -> None:
        """Kill a pair that no test can use any more."""
        del self.pairs[pair.transport]
        for node in (pair.p, pair.d):
            with contextlib.suppress(OSError, ValueError):
                node.kill()

    def expect(self, prompts: dict[str, list[int]], max_tokens: int = 8) -> dict[str, list[int]]:
        """What one engine alone says to each prompt."""
        for key, ids in prompts.items():
            self.alone.add(key, ids, max_tokens)
        return {key: out["tokens"][0] for key, out in self.alone.wait(*prompts).items()}

    def close(self) -> None:
        nodes = [self.alone, *(node for pair in self.pairs.values() for node in (pair.p, pair.d))]
        for end in (Node.finish, Node.close):
            for node in nodes:
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    end(node)
        self.nursery.close()


class Pair:
    """A prefill and a decode engine."""

    def __init__(self, fleet: Fleet, transport: str) -> None:
        self.fleet = fleet
        self.transport = transport
        self.port = free_port()
        self.p, self.d = self.start("kv_producer"), self.start("kv_consumer")
        self.p.ready()
        self.d.ready()

    def start(self, role: str, port: int | None = None, **how: Any) -> Node:
        """One more engine; ``how`` as in :meth:`Nursery.start`. Whoever starts it ends it."""
        transfer = {
            "kv_connector": "KVPushConnector",
            "kv_role": role,
            "engine_id": f"engine-{role}",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "transport": self.transport,
                "side_channel_host": "127.0.0.1",
                "side_channel_port": port or self.port,
                **SETTINGS,
            },
        }
        return self.fleet.nursery.start(self.fleet.model, transfer, **how)

    def restart(self, role: str, **how: Any) -> None:
        """A new engine in the place of one that ended."""
        node = self.start(role, **how).ready()
        if role == "kv_producer":
            self.p = node
        else:
            self.d = node

    def replace_prefill(self, **how: Any) -> None:
        """Let P end the normal way and start another one."""
        self.p.finish()
        self.p.close()
        self.restart("kv_producer", **how)

    def key(self) -> str:
        return f"key{next(self.fleet.numbers)}"

    def p_leg(self, key: str) -> dict[str, Any]:
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": key}

    def d_leg(self, key: str, port: int | None = None) -> dict[str, Any]:
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": "engine-kv_producer",
            "remote_host": "127.0.0.1",
            "remote_port": port or self.port,
            "tp_size": 1,
            "pp_size": 1,
            "remote_request_id": key,
            "transfer_id": key,
        }

    def prefill(self, key: str, ids: list[int], max_tokens: int = 1) -> None:
        self.p.add(key, ids, max_tokens, self.p_leg(key))

    def decode(self, key: str, ids: list[int], max_tokens: int = 8, port: int | None = None) -> None:
        self.d.add(key, ids, max_tokens, self.d_leg(key, port))

    def expect(self, ids: list[int], max_tokens: int = 8) -> list[int]:
        """What one engine alone says."""
        return self.fleet.expect({"x": ids}, max_tokens)["x"]

    def check(self, key: str, ids: list[int], max_tokens: int = 8, d: Node | None = None) -> None:
        """D's answer to ``key`` is that of one engine alone."""
        self.check_all({key: ids}, max_tokens, d)

    def check_all(self, prompts: dict[str, list[int]], max_tokens: int = 8, d: Node | None = None) -> None:
        """D's answers to these prompts are those of one engine alone."""
        expected = self.fleet.expect(prompts, max_tokens)
        outputs = (d or self.d).wait(*prompts)
        for key in prompts:
            assert outputs[key]["tokens"] == [expected[key]], key
            assert outputs[key]["reason"] == "length"

    def check_received(self, prompts: dict[str, list[int]], max_tokens: int = 8) -> None:
        """The same, and none of D's transfers failed."""
        self.check_all(prompts, max_tokens)
        for key in prompts:
            (record,) = self.d.trace(key)
            assert record["kind"] == "received", record
            assert record["bytes"] == record["bytes_expected"] > 0

    def check_failed(self, policy: str, key: str, ids: list[int], d: Node | None = None) -> None:
        """D's transfer of ``key`` failed, and the policy was followed."""
        d = d or self.d
        if policy == "recompute":
            self.check(key, ids, d=d)
        else:
            assert d.wait(key)[key]["reason"] == "error"
        d.until(lambda _: d.trace(key))
        assert [record["kind"] for record in d.trace(key)] == ["failed"]

    def serves(self) -> None:
        """One more request goes through, with its KV moved and no block computed by D."""
        key, ids = self.key(), prompt(300, 1000 + next(self.fleet.numbers))
        self.decode(key, ids)
        self.prefill(key, ids)
        self.p.wait(key)
        self.check_received({key: ids})

    def start_transfer(self, key: str, ids: list[int] = LONG) -> None:
        """Both sides know ``key``, some of its KV has arrived at D; P is paused in mid-prefill."""
        before = self.d.state()["stats"]["bytes_received"]
        self.p.call("pause")
        self.decode(key, ids)
        self.d.until(lambda _: self.d.status(key) == WAITING)
        self.prefill(key, ids)
        self.p.call("step", 3)
        self.d.until(lambda state: state["stats"]["bytes_received"] > before)

    def settle(self) -> None:
        """Nothing is left on either side; the next test finds both as if they were new."""
        for node in (self.p, self.d):
            node.call("hold", -1)
            node.settle()
            assert node.call("forget")
        self.d.call("policy", "recompute")

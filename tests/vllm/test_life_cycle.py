"""Two real vLLM engines through aborts, deaths, restarts, failed transfers and full caches.

After each test no request, block, push, claim or receive is left on either side, and both engines live.
"""

import contextlib
import itertools
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from life_cycle import Node, Nursery
from test_connector import free_port
from tiny import make_model, prompt

pytest.importorskip("kvpush._core", reason="the native module is not built")

pytestmark = pytest.mark.slow

SOAK = int(os.environ.get("KVPUSH_SOAK", "300"))
TIMEOUTS = {"peer_timeout_s": 2.0, "pairing_timeout_s": 2.0, "unclaimed_timeout_s": 2.0}
LONG = prompt(700, 3)
WAITING = "WAITING_FOR_REMOTE_KVS"


class Pair:
    """Prefill and decode, and one engine alone to compare with."""

    def __init__(self, folder: Path) -> None:
        self.model = make_model(folder / "model")
        self.nursery = Nursery(folder)
        self.port = free_port()
        self.numbers = itertools.count()
        self.p, self.d = self.start("kv_producer"), self.start("kv_consumer")
        self.alone = self.nursery.start(self.model, None, enable_prefix_caching=False)
        for node in (self.p, self.d, self.alone):
            node.ready()

    def start(self, role: str) -> Node:
        transfer = {
            "kv_connector": "KVPushConnector",
            "kv_role": role,
            "engine_id": f"engine-{role}",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "transport": "shm",
                "side_channel_host": "127.0.0.1",
                "side_channel_port": self.port,
                **TIMEOUTS,
            },
        }
        return self.nursery.start(self.model, transfer)

    def key(self) -> str:
        return f"key{next(self.numbers)}"

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
        self.alone.add("x", ids, max_tokens)
        return list(self.alone.wait("x")["x"]["tokens"][0])

    def check(self, key: str, ids: list[int], max_tokens: int = 8) -> None:
        """D's answer to ``key`` is that of one engine alone."""
        out = self.d.wait(key)[key]
        assert out["tokens"] == [self.expect(ids, max_tokens)], key
        assert out["reason"] == "length"

    def check_failed(self, policy: str, key: str, ids: list[int]) -> None:
        """D's transfer of ``key`` failed, and the policy was followed."""
        if policy == "recompute":
            self.check(key, ids)
        else:
            assert self.d.wait(key)[key]["reason"] == "error"

    def serves(self) -> None:
        """One more request goes through, with its KV moved and no block computed by D."""
        key, ids = self.key(), prompt(300, 1000 + next(self.numbers))
        self.decode(key, ids)
        self.prefill(key, ids)
        self.p.wait(key)
        self.check(key, ids)
        self.d.until(lambda _: self.d.trace(key))
        (record,) = self.d.trace(key)
        assert record["kind"] == "received", record
        assert record["bytes"] == record["bytes_expected"] > 0

    def settle(self) -> None:
        for node in (self.p, self.d):
            node.call("hold", -1)
            node.settle()
            assert node.call("forget")
        self.d.call("policy", "recompute")

    def restart(self, role: str) -> None:
        if role == "kv_producer":
            self.p = self.start(role).ready()
        else:
            self.d = self.start(role).ready()

    def close(self) -> None:
        nodes = (self.p, self.d, self.alone)
        for end in (Node.finish, Node.close):
            for node in nodes:
                with contextlib.suppress(OSError, ValueError):
                    end(node)
        self.nursery.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    import kvpush

    reason = kvpush.transports().get("shm", "unknown")
    if reason:
        pytest.skip(f"shm: {reason}")
    pair = Pair(tmp_path_factory.mktemp("life"))
    yield pair
    pair.close()


@pytest.fixture
def pair(engines: Pair) -> Iterator[Pair]:
    yield engines
    engines.settle()


@pytest.fixture
def deaf() -> Iterator[int]:
    """The port of a prefill engine that accepts connections and never says a word."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(16)
        yield int(sock.getsockname()[1])


def received_some(state: dict[str, Any], before: dict[str, Any]) -> bool:
    return bool(state["stats"]["bytes_received"] > before["stats"]["bytes_received"])


def start_transfer(pair: Pair, key: str, ids: list[int] = LONG) -> None:
    """Both sides know ``key``, some of its KV has arrived at D; P is paused in mid-prefill."""
    before = pair.d.state()
    pair.p.call("pause")
    pair.decode(key, ids)
    pair.d.until(lambda _: pair.d.status(key) == WAITING)
    pair.prefill(key, ids)
    pair.p.call("step", 3)
    pair.d.until(lambda state: received_some(state, before))


# ---- aborts -------------------------------------------------------------------------------------


def test_decode_is_aborted_before_it_is_scheduled(pair: Pair) -> None:
    key = pair.key()
    pair.d.call("pause")
    pair.decode(key, LONG)
    pair.d.call("abort", [key])
    pair.d.settle()
    pair.serves()


def test_decode_is_aborted_while_it_waits_for_the_hand_shake(pair: Pair, deaf: int) -> None:
    key = pair.key()
    pair.decode(key, LONG, port=deaf)
    state = pair.d.until(lambda state: state["requests"][key]["status"] == WAITING)
    assert state["used_blocks"] == 22
    assert state["open"]["parked"] == 1
    pair.d.call("abort", [key])
    # The hand-shake goes on, in its own thread; the blocks are back at once.
    pair.d.until(lambda state: not state["requests"] and not state["used_blocks"])
    pair.serves()


def test_decode_is_aborted_while_it_waits_for_kv(pair: Pair) -> None:
    pair.serves()
    key = pair.key()
    pair.decode(key, LONG)
    pair.d.until(lambda state: state["stats"]["open_receives"] and state["used_blocks"] == 22)
    pair.d.call("abort", [key])
    pair.d.settle()
    assert [record["status"] for record in pair.d.trace(key)] == ["cancelled"]
    # Prefill comes later and finds nobody: its blocks come back within its bound.
    pair.prefill(key, LONG)
    pair.p.wait(key)
    pair.p.settle()
    (record,) = pair.p.trace(key)
    assert record["kind"] == "failed", record
    pair.serves()


@pytest.mark.parametrize("both", [False, True])
def test_abort_in_mid_transfer(pair: Pair, both: bool) -> None:
    key = pair.key()
    start_transfer(pair, key)
    if both:
        pair.p.call("abort", [key])
    pair.d.call("abort", [key])
    pair.d.until(lambda state: not state["requests"] and not state["used_blocks"])
    assert [record["status"] for record in pair.d.trace(key)] == ["cancelled"]
    pair.p.call("resume")
    if not both:
        pair.p.wait(key)
    pair.p.settle()
    (record,) = pair.p.trace(key)
    assert record["status"] in ("cancelled", "aborted")
    pair.serves()


def test_decode_is_aborted_while_it_decodes(pair: Pair) -> None:
    key = pair.key()
    pair.decode(key, LONG, max_tokens=300)
    pair.prefill(key, LONG)
    pair.d.until(lambda state: state["requests"][key]["outputs"] > 2)
    pair.d.call("abort", [key])
    pair.d.settle()
    pair.p.wait(key)
    pair.p.settle()
    (record,) = pair.p.trace(key)
    assert record["kind"] == "sent"
    pair.serves()


def test_a_hundred_aborted_claims_leak_nothing(pair: Pair) -> None:
    keys = [pair.key() for _ in range(100)]
    for i, key in enumerate(keys):
        pair.decode(key, LONG)
        if i % 3:
            pair.d.until(lambda state, key=key: state["requests"][key]["status"] == WAITING)
        pair.d.call("abort", [key])
    pair.d.settle()
    # Each ended by its abort, none by a time limit.
    assert {record["status"] for key in keys for record in pair.d.trace(key)} == {"cancelled"}
    pair.serves()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_prefill_is_aborted(pair: Pair, steps: int, policy: str) -> None:
    pair.d.call("policy", policy)
    key = pair.key()
    pair.p.call("pause")
    pair.decode(key, LONG)
    pair.prefill(key, LONG)
    pair.p.call("step", steps)
    pair.p.call("abort", [key])
    pair.p.call("resume")
    pair.check_failed(policy, key, LONG)
    pair.d.until(lambda _: pair.d.trace(key))
    assert [record["status"] for record in pair.d.trace(key)] == ["aborted"]
    pair.settle()
    pair.serves()


def test_prefill_is_aborted_when_it_has_answered(pair: Pair) -> None:
    key = pair.key()
    pair.prefill(key, LONG)
    pair.p.wait(key)
    pair.p.call("abort", [key])
    pair.decode(key, LONG)
    pair.check(key, LONG)
    pair.p.settle()
    assert [record["kind"] for record in pair.p.trace(key)] == ["sent"]


# ---- failed transfers ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("fault", ["other prompt", "one token more", "never pushed", "given up", "no peer"])
def test_a_failed_transfer_follows_the_policy(pair: Pair, fault: str, policy: str, deaf: int) -> None:
    pair.d.call("policy", policy)
    key, ids = pair.key(), prompt(200, 21)
    if fault == "other prompt":
        pair.prefill(key, prompt(200, 22))
    elif fault == "one token more":
        pair.prefill(key, [*ids, 7])
    elif fault == "given up":
        pair.prefill(key, ids)
        pair.p.wait(key)
        pair.p.settle()
    pair.decode(key, ids, port=deaf if fault == "no peer" else None)
    pair.check_failed(policy, key, ids)
    expected = {
        "other prompt": "digest_mismatch",
        "one token more": "digest_mismatch",
        "never pushed": "pairing_timeout",
        "given up": "unclaimed",
        "no peer": "handshake_failed",
    }
    assert [record["status"] for record in pair.d.trace(key)] == [expected[fault]]
    if fault in ("other prompt", "one token more"):
        pair.p.wait(key)
    pair.settle()
    pair.serves()


def test_prefill_that_nobody_needs_is_told_so(pair: Pair) -> None:
    pair.serves()
    key, ids = pair.key(), prompt(200, 23)
    pair.prefill(key, ids)
    pair.p.wait(key)
    pair.d.add(key, ids, 8, pair.d_leg(key), prompt_logprobs=1)
    pair.check(key, ids)
    pair.p.settle()
    assert [record["status"] for record in pair.p.trace(key)] == ["cancelled"]


# ---- deaths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_prefill_dies_and_comes_back(pair: Pair, policy: str) -> None:
    pair.serves()
    pair.d.call("policy", policy)
    prompts = {pair.key(): prompt(500, 31 + i) for i in range(4)}
    waiting, coming, running, late = prompts
    # In mid-transfer, known to both but not begun, known to D alone, and asked for after the death.
    start_transfer(pair, running, prompts[running])
    pair.decode(coming, prompts[coming])
    pair.prefill(coming, prompts[coming])
    pair.decode(waiting, prompts[waiting])
    pair.d.until(lambda state: state["stats"]["open_receives"] == 3)
    pair.p.kill()
    pair.decode(late, prompts[late])
    for key, ids in prompts.items():
        pair.check_failed(policy, key, ids)
    pair.d.settle()
    pair.restart("kv_producer")
    pair.serves()


def test_decode_dies_again_and_again(pair: Pair) -> None:
    for _ in range(3):
        held, running, waiting = pair.key(), pair.key(), pair.key()
        pair.d.call("pause")
        for key in (held, running, waiting):
            pair.decode(key, LONG)
        pair.d.call("step", 1)
        pair.d.call("resume")
        pair.d.until(lambda state: state["stats"]["open_receives"] == 3)
        pair.d.call("pause")
        pair.p.call("pause")
        pair.prefill(running, LONG)
        pair.p.call("step", 3)
        pair.prefill(held, prompt(200, 5))
        pair.d.kill()
        pair.p.call("resume")
        pair.restart("kv_consumer")
        pair.serves()
        pair.p.wait(held, running)
    pair.p.settle()


def test_a_claim_that_ends_before_the_first_hand_shake(pair: Pair) -> None:
    pair.d.kill()
    pair.restart("kv_consumer")
    key = pair.key()
    pair.prefill(key, LONG)
    pair.p.wait(key)
    pair.d.call("pause")
    pair.decode(key, LONG)
    pair.d.call("step", 1)
    pair.d.call("abort", [key])
    pair.d.settle()
    pair.p.settle()
    pair.serves()


# ---- full caches, siblings, cached prefixes -----------------------------------------------------


def test_prefill_is_preempted(pair: Pair) -> None:
    before = pair.p.state()["preemptions"]
    prompts = {pair.key(): prompt(90 + i, 40 + i) for i in range(4)}
    # Four prompts of three blocks, and thirteen more tokens for all of them: too many.
    pair.p.call("hold", 13)
    pair.p.call("pause")
    pair.d.call("pause")
    for key, ids in prompts.items():
        pair.decode(key, ids)
        pair.prefill(key, ids, max_tokens=40)
    pair.p.call("resume")
    pair.p.until(lambda state: state["preemptions"] > before)
    pair.d.call("resume")
    outputs = pair.p.wait(*prompts)
    for key, ids in prompts.items():
        assert outputs[key]["tokens"] == [pair.expect(ids, 40)]
        pair.check(key, ids)
        assert [record["kind"] for record in pair.d.trace(key)] == ["received"]


def test_prefill_is_preempted_in_mid_transfer(pair: Pair) -> None:
    key = pair.key()
    start_transfer(pair, key)
    pair.p.call("preempt", key)
    pair.p.call("resume")
    assert pair.p.wait(key)[key]["tokens"] == [pair.expect(LONG, 1)]
    pair.check(key, LONG)
    assert [record["kind"] for record in pair.d.trace(key)] == ["received"]


def test_four_completions_of_one_prompt(pair: Pair) -> None:
    key, ids = pair.key(), prompt(100, 50)
    pair.d.add(key, ids, 8, pair.d_leg(key), n=4)
    pair.prefill(key, ids)
    pair.p.wait(key)
    assert pair.d.wait(key)[key]["tokens"] == [pair.expect(ids)] * 4
    assert [record["kind"] for record in pair.d.trace(key)] == ["received"]


def test_decode_without_room_queues(pair: Pair) -> None:
    prompts = {pair.key(): prompt(60 + i, 60 + i) for i in range(30)}
    pair.d.call("hold", 10)
    for key, ids in prompts.items():
        pair.decode(key, ids)
        pair.prefill(key, ids)
    pair.p.wait(*prompts)
    for key, ids in prompts.items():
        pair.check(key, ids)
        assert [record["kind"] for record in pair.d.trace(key)] == ["received"]


def test_room_for_one_and_opposite_orders(pair: Pair) -> None:
    prompts = {pair.key(): prompt(100, 95 + i) for i in range(2)}
    for node in (pair.p, pair.d):
        node.call("hold", 5)
        node.call("pause")
    for key in prompts:
        pair.decode(key, prompts[key])
    for key in reversed(prompts):
        pair.prefill(key, prompts[key])
    for node in (pair.p, pair.d):
        node.call("resume")
    for key, ids in prompts.items():
        pair.check(key, ids)
    pair.p.wait(*prompts)
    # Each side waited for what the other had no room for, until prefill gave up what nobody had opened.
    first, last = prompts
    assert [record["status"] for record in pair.p.trace(last)] == ["evicted"]
    assert [record["kind"] for record in pair.d.trace(first)] == ["received"]


def test_a_prefix_that_decode_holds_is_not_moved(pair: Pair) -> None:
    ids = prompt(300, 70)
    moved = []
    for length in (160, 300, 300):
        key = pair.key()
        pair.prefill(key, ids[:length])
        pair.decode(key, ids[:length])
        pair.check(key, ids[:length])
        pair.p.wait(key)
        (record,) = pair.d.trace(key)
        assert record["bytes"] == record["bytes_expected"]
        moved.append(record["per_block_descriptors"] // 3)
    # All blocks, then those after the held ones; the block of the last token is always needed.
    assert moved == [5, 5, 1]


def test_requests_may_wait_longer_than_an_unclaimed_push(pair: Pair) -> None:
    pair.serves()
    prompts = {pair.key(): prompt(30, 200 + i) for i in range(64)}
    pair.d.call("pause")
    for key, ids in prompts.items():
        pair.decode(key, ids)
    pair.d.call("step", 1)
    for key, ids in prompts.items():
        pair.prefill(key, ids)
    pair.p.wait(*prompts)
    lost = pair.key()
    pair.prefill(lost, prompt(30, 199))
    pair.p.until(lambda _: [record["status"] for record in pair.p.trace(lost)] == ["unclaimed"])
    pair.p.wait(lost)
    pair.d.call("resume")
    for key, ids in prompts.items():
        pair.check(key, ids)
        assert [record["kind"] for record in pair.d.trace(key)] == ["received"]


# ---- soak ---------------------------------------------------------------------------------------


def test_soak(pair: Pair) -> None:
    """``KVPUSH_SOAK`` short requests, sixteen at a time, one in ten aborted on a side, or on both."""
    rng = random.Random(11)
    prompts = [prompt(rng.randint(1, 150), 300 + i) for i in range(40)]
    expected = [pair.expect(ids, 4) for ids in prompts]
    open_keys: list[tuple[str, int]] = []
    received = 0
    for i in range(SOAK):
        key, which = pair.key(), rng.randrange(len(prompts))
        legs = [(pair.prefill, 1), (pair.decode, 4)]
        for leg, max_tokens in rng.sample(legs, 2):
            leg(key, prompts[which], max_tokens)
        if rng.random() < 0.1:
            for node in rng.choice([(pair.p,), (pair.d,), (pair.p, pair.d)]):
                if rng.random() < 0.7:
                    node.call("step", rng.randint(0, 3))
                node.call("abort", [key])
            continue
        open_keys.append((key, which))
        while len(open_keys) >= (16 if i < SOAK - 1 else 1):
            done, which = open_keys.pop(0)
            assert pair.d.wait(done)[done]["tokens"] == [expected[which]]
            pair.p.wait(done)
            received += 1
    assert received > SOAK // 2
    pair.settle()
    pair.serves()

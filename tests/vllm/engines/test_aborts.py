"""Requests that a client gives up, on either side, in each phase."""

from collections.abc import Iterator

import pytest
from nodes import Node
from pairs import LONG, WAITING, Pair, both_transports
from tiny import free_port, prompt


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


def test_case_f1_decode_is_aborted_while_it_waits_for_kv(pair: Pair) -> None:
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


@both_transports
@pytest.mark.parametrize("both", [False, True])
def test_case_f2_abort_in_mid_transfer(pair: Pair, both: bool) -> None:
    key = pair.key()
    pair.start_transfer(key)
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


def test_case_f1_a_hundred_aborted_claims_leak_nothing(pair: Pair) -> None:
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


@pytest.fixture
def middle(pair: Pair) -> Iterator[Node]:
    """An engine of role kv_both, at ``middle.port``."""
    port = free_port()
    node = pair.start("kv_both", port=port).ready()
    node.port = port
    yield node
    node.finish()
    node.close()


def test_case_f12_a_request_that_receives_and_sends(pair: Pair, middle: Node) -> None:
    """One request of an engine in the middle receives its prompt from P and pushes it on to D."""

    def start(key: str, ids: list[int]) -> None:
        pair.p.call("pause")
        pair.decode(key, ids, port=middle.port)
        middle.add(key, ids, 1, pair.d_leg(key) | {"do_remote_decode": True})
        pair.prefill(key, ids)
        pair.p.call("step", 3)
        middle.until(lambda state: state["stats"]["open_receives"] and state["stats"]["open_pushes"])
        pair.d.until(lambda _: pair.d.status(key) == WAITING)

    key = pair.key()
    start(key, LONG)
    pair.p.call("resume")
    pair.p.wait(key)
    assert middle.wait(key)[key]["tokens"] == [pair.expect(LONG, 1)]
    pair.check_received({key: LONG})
    assert sorted(record["kind"] for record in middle.trace(key)) == ["received", "sent"]

    # Given up while both are open: each ends once, everywhere.
    key, ids = pair.key(), prompt(700, 4)
    start(key, ids)
    middle.call("abort", [key])
    middle.call("abort", [key])
    pair.check_failed("recompute", key, ids)
    pair.p.call("resume")
    pair.p.wait(key)
    middle.settle()
    assert sorted(record["status"] for record in middle.trace(key)) == ["aborted", "cancelled"]

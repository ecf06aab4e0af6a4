"""P's half: preemption, aborts, memory pressure."""

import pytest
from harness import Pair, equal, tokens

from kvpush.errors import QueueFull
from kvpush.vllm.scheduler import MAX_WAITS


def test_preemption_retracts_and_goes_on(pair: Pair) -> None:
    prompt = tokens(12)
    d = pair.d_request(prompt, "k", ([20, 21, 22],))
    pair.load(d)
    p = pair.p_request(prompt, "k", ([1, 2, 3],))
    pair.p.step({p: 8})
    p.num_computed_tokens = 0
    meta = pair.p.step(preempted=(p,))
    assert meta.retracts == [p.request_id]
    assert pair.p.engine.called("retract") == [("k",)]
    p.blocks = ([5, 6, 7],)
    pair.p.step({p: 6})
    pair.p.step({p: 6})
    assert pair.p.engine.called("advance") == [("k", [[1, 2]]), ("k", [[]]), ("k", [[7]])]
    assert pair.p.finish(p)[0]
    pair.d.step_until(lambda: pair.d.received == [d.request_id])
    assert equal(pair, [1, 2, 7], [20, 21, 22])
    pair.p.step()
    assert pair.p.sent == [p.request_id]


@pytest.mark.parametrize("computed", [0, 2, 4, 8])
def test_abort_of_prefill(pair: Pair, computed: int) -> None:
    p = pair.p_request(tokens(8), "k", ([1, 2],))
    if computed:
        pair.p.step({p: computed})
    delayed, params = pair.p.abort(p)
    assert delayed == (computed >= 4)
    assert params is None
    assert pair.p.abort(p) == (False, None)
    pair.p.step()
    pair.p.step()
    assert pair.p.sent == ([p.request_id] if delayed else [])
    assert pair.p.engine.called("push") == [("k",)]
    assert len(pair.p.engine.called("abort")) == 1


def test_blocks_of_an_aborted_prefill_wait_for_running_packs(pair: Pair) -> None:
    pair.p.engine.auto = False
    p = pair.p_request(tokens(8), "k", ([1, 2],))
    pair.p.step({p: 4})
    push = pair.p.engine.pushes["k"]
    assert pair.p.abort(p) == (True, None)
    pair.p.step()
    assert pair.p.sent == []
    pair.p.engine.emit("failed", push, status="aborted")
    pair.p.step()
    assert pair.p.sent == [p.request_id]


def test_case_f12_an_end_before_the_request_ends_is_kept_until_vllm_waits(pair: Pair) -> None:
    prompt = tokens(8)
    d = pair.d_request(prompt, "k", ([20, 21],))
    pair.load(d)
    pair.d.step()
    pair.d.step_until(lambda: bool(pair.d.engine.called("receive")))
    p = pair.p_request(prompt, "k", ([1, 2],))
    pair.p.step({p: 8})
    pair.p.step()
    assert pair.p.sent == []
    assert pair.p.finish(p)[0]
    pair.p.step()
    assert pair.p.sent == [p.request_id]


def test_prefill_that_cannot_open_its_push_still_serves_the_request(pair: Pair) -> None:
    pair.p.engine.raises["push"] = [QueueFull("full")]
    p = pair.p_request(tokens(8), "k", ([1, 2],))
    pair.p.step({p: 8})
    assert pair.p.finish(p)[0]
    pair.p.step()
    assert pair.p.sent == [p.request_id]
    assert pair.p.worker.take_stats().data["failures"] == {"queue_full": 1}


def test_a_second_push_of_a_key_is_skipped(pair: Pair) -> None:
    first = pair.p_request(tokens(8), "k", ([1, 2],))
    second = pair.p_request(tokens(8), "k", ([3, 4],))
    pair.p.step({first: 8, second: 8})
    assert pair.p.finish(second) == (False, None)
    assert pair.p.finish(first)[0]
    assert pair.p.scheduler.stats.data["skipped"] == {"duplicate_key": 1}


def test_memory_pressure_waits_a_little_and_takes_no_push_from_d(pair: Pair) -> None:
    assert not pair.p.scheduler.has_pending_block_frees()
    p = pair.p_request(tokens(8), "k", ([1, 2],))
    pair.p.step({p: 8})
    pair.p.finish(p)
    waits = 0
    while pair.p.scheduler.has_pending_block_frees():
        waits += 1
        pair.p.step()
    assert waits == MAX_WAITS
    assert pair.p.engine.called("evict") == []
    assert pair.p.sent == []


def test_a_stalled_engine_gives_up_the_oldest_unopened_push(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks held for a D that waits for us must not stop everything for ever."""
    monkeypatch.setattr("kvpush.vllm.scheduler.STALL_SECONDS", 0.0)
    p = pair.p_request(tokens(8), "k", ([1, 2],))
    pair.p.step({p: 8})
    pair.p.finish(p)
    pair.p.step()
    assert pair.p.engine.called("evict") == []  # nobody waits for blocks
    pair.p_request(tokens(8), "waits", ([3, 4],))
    for _ in range(3):
        pair.p.step()
    assert (1,) in pair.p.engine.called("evict")
    assert pair.p.sent == [p.request_id]

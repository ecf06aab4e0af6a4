"""D's half: attempts, claims, cancels, keys, digests."""

import threading
from typing import Any

import pytest
import torch
from harness import Blocks, Pair, Request, connect, equal, tokens

from kvpush.vllm.side_channel import ask


def test_matching_is_repeatable_and_the_load_is_tried_once(pair: Pair) -> None:
    d = pair.d_request(tokens(8), "k", ([20, 21],))
    for _ in range(5):
        assert pair.d.scheduler.get_num_new_matched_tokens(d, 4) == (4, True)
    pair.load(d)
    pair.d.scheduler.update_state_after_alloc(d, Blocks(d.blocks), 0)
    meta = pair.d.step()
    assert [fetch.req_id for fetch in meta.fetches] == [d.request_id]
    assert meta.cancels == []
    assert pair.d.scheduler.get_num_new_matched_tokens(d, 0) == (0, False)


def test_case_f11_nothing_left_to_load_tells_prefill_at_once(pair: Pair) -> None:
    connect(pair)
    prompt = tokens(8)
    p = pair.p_request(prompt, "k", ([1, 2],))
    pair.p.step({p: 8})
    assert pair.p.finish(p)[0]
    pair.p.step()
    assert pair.p.sent == []
    d = pair.d_request(prompt, "k", ([20, 21],))
    pair.d.scheduler.update_state_after_alloc(d, Blocks(d.blocks), 0)
    pair.d.step()
    assert pair.d.received == []
    pair.p.step()
    assert pair.p.sent == [p.request_id]
    assert pair.d.scheduler.stats.data["skipped"] == {"nothing_to_load": 1}


@pytest.mark.parametrize(
    "phase", ["same step", "claimed", "waiting for a hand-shake", "loading", "done", "failed"]
)
def test_abort_of_decode_in_each_phase(pair: Pair, phase: str) -> None:
    if phase != "waiting for a hand-shake":
        connect(pair)
    prompt = tokens(8)
    d = pair.d_request(prompt, "k", ([20, 21],))
    expected: list[str] = []
    if phase == "claimed":
        pair.d.step()
    elif phase in ("waiting for a hand-shake", "loading"):
        pair.load(d)
        pair.d.step()
        expected = [d.request_id]
    elif phase == "done":
        p = pair.p_request(prompt, "k", ([1, 2],))
        pair.p.step({p: 8})
        pair.load(d)
        pair.d.step_until(lambda: pair.d.received == [d.request_id])
        expected = [d.request_id]
    elif phase == "failed":
        pair.load(d)
        pair.d.step()
        pair.p.engine.lose("nobody")
        pair.d.engine.lose(pair.p.engine.incarnation)
        pair.d.step_until(lambda: pair.d.failed == [d.request_id])
        expected = [d.request_id]
    assert pair.d.abort(d) == (False, None)
    pair.d.step()
    for _ in range(3):
        pair.d.step()
        assert pair.d.received == expected
    assert pair.d.abort(d) == (False, None)
    pair.d.step()
    assert pair.d.received == expected
    assert len(pair.d.worker._loads) == 0


def test_an_abort_during_the_hand_shake_still_frees_prefill(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted = threading.Event()

    def ask_after_the_abort(*args: Any) -> Any:
        aborted.wait()
        return ask(*args)

    monkeypatch.setattr("kvpush.vllm.handshake.ask", ask_after_the_abort)
    prompt = tokens(8)
    p = pair.p_request(prompt, "k", ([1, 2],))
    pair.p.step({p: 8})
    pair.p.finish(p)
    d = pair.d_request(prompt, "k", ([20, 21],))
    pair.load(d)
    pair.d.step()
    pair.d.abort(d)
    pair.d.step()
    assert pair.d.received == [d.request_id]
    aborted.set()
    # D has no work and is not stepped any more.
    pair.p.step_until(lambda: pair.p.sent == [p.request_id])


def test_a_cancel_waits_for_a_running_unpack(pair: Pair) -> None:
    connect(pair)
    pair.d.engine.auto = False
    d = pair.d_request(tokens(8), "k", ([20, 21],))
    pair.load(d)
    pair.d.step()
    (recv,) = pair.d.engine.receives.values()
    pair.d.abort(d)
    pair.d.step()
    pair.d.step()
    assert pair.d.received == []
    pair.d.engine.emit("failed", recv, status="cancelled")
    pair.d.step()
    assert (pair.d.received, pair.d.failed) == ([d.request_id], [])


def test_children_of_one_request_load_once(pair: Pair) -> None:
    params = pair.d_params(remote_request_id="abc")
    prompt = tokens(8)
    children = [Request(prompt, params, f"{i}_cmpl-abc-0-01234567", blocks=([20 + i],)) for i in range(3)]
    for child in children:
        pair.d.scheduler.on_new_request(child)
    answers = [pair.d.scheduler.get_num_new_matched_tokens(child, 0) for child in children]
    assert answers == [(8, True), (0, False), (0, False)]
    assert pair.d.scheduler.stats.data["skipped"] == {"sibling": 2}
    for child in children[1:]:
        pair.d.scheduler.update_state_after_alloc(child, Blocks(child.blocks), 0)
        assert pair.d.finish(child) == (False, None)


def test_case_c3_prompts_of_one_completion_have_their_own_keys(pair: Pair) -> None:
    p_params, d_params = pair.p_params(transfer_id="t"), pair.d_params(transfer_id="t")
    prompts = [tokens(8, seed) for seed in (1, 2)]
    sources, targets = ([1, 2], [3, 4]), ([20, 21], [22, 23])
    ds = []
    for i, prompt in enumerate(prompts):
        p = Request(prompt, p_params, f"cmpl-p-{i}-0123abcd", blocks=(sources[i],))
        d = Request(prompt, d_params, f"cmpl-d-{i}-4567abcd", blocks=(targets[i],))
        pair.p.scheduler.on_new_request(p)
        pair.d.scheduler.on_new_request(d)
        pair.load(d)
        pair.p.step({p: 8})
        ds.append(d.request_id)
    pair.d.step_until(lambda: sorted(pair.d.received) == sorted(ds))
    assert not pair.d.failed
    assert equal(pair, sources[0], targets[0])
    assert equal(pair, sources[1], targets[1])


@pytest.mark.parametrize("extra", [1, -1])
def test_case_c2_another_prompt_is_refused_by_digest(pair: Pair, extra: int) -> None:
    p = pair.p_request(tokens(8), "k", ([1, 2],))
    d = pair.d_request(tokens(8 + extra), "k", ([20, 21, 22],))
    before = pair.d.caches["layers.0"].clone()
    pair.load(d)
    pair.p.step({p: 8})
    pair.d.step_until(lambda: pair.d.received == [d.request_id])
    assert pair.d.failed == [d.request_id]
    assert torch.equal(before, pair.d.caches["layers.0"])
    assert pair.d.worker.take_stats().data["failures"] == {"digest_mismatch": 1}

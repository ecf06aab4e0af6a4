"""Scheduler half and worker half against a fake engine, driven as vLLM drives them."""

import copy
import pickle
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import BLOCK, Blocks, Instance, Pair, Request

from kvpush.errors import ClosedError, PeerLost, QueueFull
from kvpush.testing import FakeNetwork
from kvpush.vllm import layout
from kvpush.vllm.scheduler import MAX_WAITS
from kvpush.vllm.side_channel import ask


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(free_port())
    yield pair
    pair.close()


def tokens(n: int, seed: int = 0) -> list[int]:
    return [seed * 1000 + i for i in range(n)]


def connect(pair: Pair) -> None:
    """Establish D's session, so that later steps need no waiting."""
    request = pair.d_request(tokens(4, 99), "warm-up", ([60],))
    pair.d.step()
    pair.d.step_until(lambda: bool(pair.d.engine.called("expect")))
    pair.d.abort(request)
    pair.d.step()
    pair.d.engine.calls.clear()


def equal(pair: Pair, source: list[int], target: list[int], layers: tuple[str, ...] | None = None) -> bool:
    return all(
        torch.equal(pair.p.caches[name][a], pair.d.caches[name][b])
        for name in layers or pair.p.caches
        for a, b in zip(source, target, strict=True)
    )


# ---- the plain way ------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [0, 1, 2, 3])
@pytest.mark.parametrize("chunk", [3, 4, 5, 100])
def test_only_what_decode_lacks_arrives(pair: Pair, held: int, chunk: int) -> None:
    prompt, source, target = tokens(14), [9, 3, 7, 5], [20, 23, 21, 22]
    before = {name: cache.clone() for name, cache in pair.d.caches.items()}
    d = pair.d_request(prompt, "k", (target,))
    assert pair.load(d, held * BLOCK) == 14 - held * BLOCK
    pair.d.step()
    p = pair.p_request(prompt, "k", (source,))
    while p.num_computed_tokens < 14:
        pair.p.step({p: min(chunk, 14 - p.num_computed_tokens)})
    delayed, params = pair.p.finish(p)
    assert delayed
    assert params["transfer_mode"] == "push"
    pair.d.step_until(lambda: pair.d.received == [d.request_id])
    assert pair.d.failed == []
    assert equal(pair, source[held:], target[held:])
    for name, cache in pair.d.caches.items():
        for block in [*range(20), *target[:held], *range(24, 64)]:
            assert torch.equal(cache[block], before[name][block])
    pair.p.step()
    assert pair.p.sent == [p.request_id]
    units = [len(call[1][0]) for call in pair.p.engine.called("advance")]
    assert sum(units) == 4


def test_response_has_the_fields_of_the_upstream_connector(pair: Pair) -> None:
    p = pair.p_request(tokens(5), "k", ([1, 2],))
    pair.p.step({p: 5})
    _, params = pair.p.finish(p)
    assert {name: params[name] for name in params if name != "remote_block_ids"} == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine-kv_producer",
        "remote_request_id": p.request_id,
        "remote_host": "127.0.0.1",
        "remote_port": pair.port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 5,
        "transfer_mode": "push",
        "transfer_id": "k",
    }


def test_windowed_groups_wait_for_the_last_chunk_and_skip_holes() -> None:
    pair = Pair(free_port(), windowed=True)
    try:
        prompt = tokens(12)
        d = pair.d_request(prompt, "k", ([20, 21, 22], [0, 31, 32]))
        pair.load(d)
        p = pair.p_request(prompt, "k", ([1, 2, 3], [11, 12, 13]))
        meta = pair.p.step({p: 8})
        assert meta.advances[0].blocks == ([1, 2], [])
        p.blocks = ([1, 2, 3], [0, 12, 13])
        meta = pair.p.step({p: 4})
        assert meta.advances[0].blocks == ([3], [-1, 12, 13])
        pair.d.step_until(lambda: pair.d.received == [d.request_id])
        assert not pair.d.failed
        assert equal(pair, [12, 13], [31, 32], ("layers.2",))
    finally:
        pair.close()


def test_metadata_is_picklable_and_its_ids_are_copies(pair: Pair) -> None:
    p = pair.p_request(tokens(8), "k", ([1, 2],))
    meta = pair.p.step({p: 8})
    p.blocks[0].extend([3, 4])
    assert meta.advances[0].blocks == ([1, 2],)
    assert pickle.loads(pickle.dumps(meta)) == meta


def test_params_are_never_written_to(pair: Pair) -> None:
    prompt = tokens(8)
    p = pair.p_request(prompt, "k", ([1, 2],))
    d = pair.d_request(prompt, "k", ([20, 21],))
    before = copy.deepcopy((p.kv_transfer_params, d.kv_transfer_params))
    pair.load(d)
    pair.p.step({p: 8})
    pair.p.finish(p)
    pair.d.step_until(lambda: bool(pair.d.received))
    pair.d.finish(d)
    assert (p.kv_transfer_params, d.kv_transfer_params) == before


# ---- D: attempts, claims, cancels ---------------------------------------------------------------


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


def test_nothing_left_to_load_tells_prefill_at_once(pair: Pair) -> None:
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


def test_prompts_of_one_completion_have_their_own_keys(pair: Pair) -> None:
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
def test_another_prompt_is_refused_by_digest(pair: Pair, extra: int) -> None:
    p = pair.p_request(tokens(8), "k", ([1, 2],))
    d = pair.d_request(tokens(8 + extra), "k", ([20, 21, 22],))
    before = pair.d.caches["layers.0"].clone()
    pair.load(d)
    pair.p.step({p: 8})
    pair.d.step_until(lambda: pair.d.received == [d.request_id])
    assert pair.d.failed == [d.request_id]
    assert torch.equal(before, pair.d.caches["layers.0"])
    assert pair.d.worker.take_stats().data["failures"] == {"digest_mismatch": 1}


# ---- P: preemption, ends ------------------------------------------------------------------------


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


def test_an_end_before_the_request_ends_is_kept_until_vllm_waits(pair: Pair) -> None:
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


# ---- bad input ----------------------------------------------------------------------------------

BAD_DECODE: list[dict[str, Any]] = [
    *({name: None} for name in ("remote_engine_id", "remote_host", "remote_port", "tp_size")),
    {"transfer_id": None, "remote_request_id": None},
    {"transfer_id": 7},
    {"transfer_id": ""},
    {"transfer_id": "x" * 5000},
    {"remote_request_id": ["a"], "transfer_id": None},
    {"remote_host": 5},
    {"remote_port": "5600"},
    {"remote_port": True},
    {"remote_port": 0},
    {"remote_port": 65536},
    {"remote_port": 5600.0},
    {"tp_size": 2},
    {"tp_size": "1"},
    {"pp_size": 2},
    {"pp_size": {}},
    {"remote_engine_id": {}},
]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("bad", BAD_DECODE, ids=str)
def test_bad_decode_params_fail_that_request_only(bad: dict[str, Any], policy: str) -> None:
    pair = Pair(free_port(), policy=policy)
    try:
        d = Request(tokens(8), pair.d_params(transfer_id="k") | bad, blocks=([20, 21],))
        pair.d.scheduler.on_new_request(d)
        promised = pair.load(d)
        pair.d.step()
        if policy == "fail":
            assert promised == 8
            assert (pair.d.received, pair.d.failed) == ([d.request_id], [d.request_id])
        else:
            assert promised == 0
            assert pair.d.received == []
        assert pair.d.finish(d) == (False, None)
        assert pair.d.scheduler.stats.data["skipped"] == {"bad_params": 1}
        good = pair.d_request(tokens(8), "good", ([22, 23],))
        p = pair.p_request(tokens(8), "good", ([1, 2],))
        pair.load(good)
        pair.p.step({p: 8})
        pair.d.step_until(lambda: good.request_id in pair.d.received)
        assert good.request_id not in pair.d.failed
    finally:
        pair.close()


@pytest.mark.parametrize(
    "params", [[1], "text", 5, {"do_remote_prefill": "yes"}, {"do_remote_prefill": 1}], ids=str
)
def test_params_of_another_type_are_no_transfer(pair: Pair, params: Any) -> None:
    request = Request(tokens(8), params, blocks=([1, 2],))
    pair.d.scheduler.on_new_request(request)
    assert pair.d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert pair.d.finish(request) == (False, None)
    assert pair.d.scheduler.stats.data["skipped"] == {"bad_params": 1}


def test_roles_that_do_not_match_are_no_transfer(pair: Pair) -> None:
    d = Request(tokens(8), pair.p_params(transfer_id="k"), blocks=([1, 2],))
    pair.d.scheduler.on_new_request(d)
    p = Request(tokens(8), pair.d_params(transfer_id="k"), blocks=([1, 2],))
    pair.p.scheduler.on_new_request(p)
    assert pair.p.scheduler.get_num_new_matched_tokens(p, 0) == (0, False)
    for instance, request in ((pair.d, d), (pair.p, p)):
        instance.step({request: 8})
        assert instance.finish(request) == (False, None)
        assert instance.scheduler.stats.data["skipped"] == {"wrong_role": 1}


def test_prompt_embeddings_are_refused_and_the_other_side_hears_of_it(pair: Pair) -> None:
    connect(pair)
    p = Request(None, pair.p_params(transfer_id="k"), prompt_embeds=[0.0] * 8, blocks=([1, 2],))
    d = pair.d_request(tokens(8), "k", ([20, 21],))
    pair.load(d)
    pair.d.step()
    pair.p.scheduler.on_new_request(p)
    pair.p.step({p: 8})
    assert pair.p.finish(p) == (False, None)
    pair.d.step()
    assert pair.d.failed == [d.request_id]


# ---- peers --------------------------------------------------------------------------------------


def test_a_dead_peer_fails_its_request_and_delays_no_other(pair: Pair) -> None:
    prompt = tokens(8)
    bad = Request(prompt, pair.d_params(transfer_id="bad", remote_port=free_port()), blocks=([30, 31],))
    pair.d.scheduler.on_new_request(bad)
    pair.load(bad)
    pair.d.step()
    p = pair.p_request(prompt, "k", ([1, 2],))
    pair.p.step({p: 8})
    good = pair.d_request(prompt, "k", ([20, 21],))
    pair.load(good)
    pair.d.step_until(lambda: good.request_id in pair.d.received)
    assert bad.request_id not in pair.d.received
    pair.d.step_until(lambda: bad.request_id in pair.d.received)
    assert pair.d.failed == [bad.request_id]


def test_a_lost_session_is_made_anew_for_the_next_request(pair: Pair) -> None:
    connect(pair)
    lost = pair.d_request(tokens(8), "lost", ([20, 21],))
    pair.load(lost)
    claimed = pair.d_request(tokens(8, 1), "claimed", ([22, 23],))
    pair.d.step()
    pair.d.engine.lose(pair.p.engine.incarnation)
    pair.d.step()
    assert pair.d.failed == [lost.request_id]
    pair.load(claimed)
    p = pair.p_request(tokens(8, 1), "claimed", ([1, 2],))
    pair.p.step({p: 8})
    pair.d.step_until(lambda: claimed.request_id in pair.d.received)
    assert pair.d.failed == [lost.request_id]
    stats = pair.d.worker.take_stats().data
    assert stats["sessions_lost"] == 1
    assert stats["handshakes"] == 2


def test_peer_lost_in_the_call_is_tried_again_and_ends(pair: Pair) -> None:
    connect(pair)
    pair.d.engine.raises["expect"] = [PeerLost("gone")]
    p = pair.p_request(tokens(8), "k", ([1, 2],))
    pair.p.step({p: 8})
    d = pair.d_request(tokens(8), "k", ([20, 21],))
    pair.load(d)
    pair.d.step_until(lambda: pair.d.received == [d.request_id])
    assert not pair.d.failed
    pair.d.engine.raises["expect"] = [PeerLost("gone")] * 50
    d = pair.d_request(tokens(8), "k2", ([22, 23],))
    pair.load(d)
    pair.d.step_until(lambda: d.request_id in pair.d.failed)


def test_a_full_queue_is_tried_again(pair: Pair) -> None:
    connect(pair)
    pair.d.engine.raises["receive"] = [QueueFull("full")] * 2
    p = pair.p_request(tokens(8), "k", ([1, 2],))
    pair.p.step({p: 8})
    d = pair.d_request(tokens(8), "k", ([20, 21],))
    pair.load(d)
    pair.d.step_until(lambda: pair.d.received == [d.request_id])
    assert not pair.d.failed


def test_an_engine_that_breaks_fails_what_is_open(pair: Pair) -> None:
    connect(pair)
    d = pair.d_request(tokens(8), "k", ([20, 21],))
    pair.load(d)
    pair.d.step()
    pair.d.engine.raises["poll"] = [ClosedError("broken")]
    pair.d.step()
    assert pair.d.failed == [d.request_id]
    later = pair.d_request(tokens(8), "k2", ([20, 21],))
    pair.load(later)
    pair.d.step()
    assert pair.d.failed == [d.request_id, later.request_id]


def test_sleep_and_wake(pair: Pair) -> None:
    connect(pair)
    for _ in range(2):
        pair.p.worker.close_engine("asleep")
    d = pair.d_request(tokens(8), "early", ([20, 21],))
    pair.load(d)
    pair.d.step_until(lambda: pair.d.failed == [d.request_id])
    for _ in range(2):
        pair.p.reopen()
    assert len(pair.p.engines) == 2
    p = pair.p_request(tokens(8), "k", ([1, 2],))
    pair.p.step({p: 8})
    d = pair.d_request(tokens(8), "k", ([20, 21],))
    pair.load(d)
    pair.d.step_until(lambda: d.request_id in pair.d.received)
    assert d.request_id not in pair.d.failed


def test_another_model_is_refused_by_name(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.d.engine.fingerprint["model"] = "another"
    pair.p.engine.fingerprint["model"] = "this"
    d = pair.d_request(tokens(8), "k", ([20, 21],))
    pair.load(d)
    pair.d.step_until(lambda: pair.d.failed == [d.request_id])


# ---- start-up -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_parallel_sizes_are_refused(name: str) -> None:
    from harness import vllm_config

    with pytest.raises(layout.UnsupportedSetupError, match=f"{name} = 1, got 2"):
        layout.check_parallelism(vllm_config("kv_both", **{name: 2}))


def test_kernel_blocks_are_refused_with_both_values() -> None:
    instance = Instance("kv_producer", FakeNetwork(), port=free_port())
    try:
        caches = {name: torch.zeros(128, 1, BLOCK, 4) for name in instance.caches}
        with pytest.raises(layout.UnsupportedSetupError, match="128 kernel blocks for 64 cache blocks"):
            layout.describe(instance.config, instance.kv, caches)
    finally:
        instance.close()


def test_shared_layers_are_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_backends", lambda _: "TEST")
    instance = Instance("kv_producer", FakeNetwork(), port=free_port())
    try:
        one = torch.zeros(64, 1, BLOCK, 4)
        spec = layout.describe(instance.config, instance.kv, {"layers.0": one, "layers.1": one})
        assert [plane.name for plane in spec.groups[0].planes] == ["layers.0"]
        assert spec.groups[0].unit_bytes == BLOCK * 4 * 4
    finally:
        instance.close()


def test_mamba_is_refused() -> None:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

    spec = MambaSpec(block_size=4, shapes=((2, 2),), dtypes=(torch.float32,))
    with pytest.raises(layout.UnsupportedSetupError, match="MambaSpec"):
        layout.plan_groups(KVCacheConfig(64, [], [KVCacheGroupSpec(["m"], spec)]))

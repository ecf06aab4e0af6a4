"""The public API, two real engines per test: data, order of events, bad arguments."""

import gc
import math
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from engines import DIGEST, TRANSPORTS, arrays, cache, pair, wait, wait_for

import kvpush


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_moves_shuffled_blocks_and_touches_nothing_else(transport):
    with pair(transport, num_groups=2) as t:
        rng = np.random.default_rng(1)
        src = [rng.permutation(64)[:20], rng.permutation(64)[:7]]
        dst = [rng.permutation(64)[:20], rng.permutation(64)[:7]]
        push = t.p.push("k", digest=DIGEST)
        recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=dst)
        push.advance([src[0][:5], src[1]])
        push.advance([src[0][5:].tolist(), []])
        push.finish()
        received = wait(t.d)[0]
        sent = wait(t.p)[0]
        assert (received.kind, received.handle, received.status) == ("received", recv.handle, "ok")
        assert (sent.kind, sent.handle, sent.peer) == ("sent", push.handle, t.peer)
        num_bytes = sum(len(s) * sum(a[0].nbytes for a in t.source[g]) for g, s in enumerate(src))
        assert received.bytes == sent.bytes == num_bytes
        for g in range(2):
            for source, target in zip(t.source[g], t.target[g], strict=True):
                assert np.array_equal(target[dst[g]], source[src[g]])
                others = np.setdiff1d(np.arange(64), dst[g])
                assert not target[others].any()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_network_operations_do_not_depend_on_the_block_tables(transport):
    ops = []
    for order in (np.arange(512), np.random.default_rng(2).permutation(512)):
        with pair(transport, blocks=512, num_planes=5, config={"slot_bytes": 4096, "num_slots": 4}) as t:
            push = t.p.push("k", digest=DIGEST)
            recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[order[::-1]])
            push.advance([order])
            push.finish()
            assert wait_for(t.d, recv.handle).kind == "received"
            assert all(
                np.array_equal(b[order[::-1]], a[order])
                for a, b in zip(t.source[0], t.target[0], strict=True)
            )
            ops.append(t.p.stats()["network_ops"])
    assert ops[0] == ops[1]
    # 5 planes x 512 blocks of 256 bytes in slots of 4096 bytes; per-block posting would be 2560.
    assert ops[0] <= 5 * 512 * 256 // 4096 * 16 // 15 + 1


def test_strided_views_and_int64_ids():
    base = arrays(num_planes=1, blocks=16, heads=4, tokens=6, content=10)[0]
    source = base[:, ::2, 1:5, :7]
    target = np.zeros((16, 2, 4, 7), np.float32)
    with kvpush.Engine(cache([[source]])) as p, kvpush.Engine(cache([[target]])) as d:
        peer = d.establish(p.answer(d.offer()))
        push = p.push("k", digest=DIGEST)
        recv = d.receive(peer, "k", digest=DIGEST, blocks=[np.array([1, 0, 5], np.int64)])
        push.advance([(3, 9, 12)])
        push.finish()
        assert wait_for(d, recv.handle).kind == "received"
        assert np.array_equal(target[[1, 0, 5]], source[[3, 9, 12]])


def test_holes_are_not_wanted_and_not_touched():
    with pair("shm") as t:
        push = t.p.push("k", digest=DIGEST)
        recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[-1, 4, -1, 6]])
        push.advance([[-1, 10, -1, 12]])
        push.finish()
        assert wait_for(t.d, recv.handle).kind == "received"
        assert np.array_equal(t.target[0][0][[4, 6]], t.source[0][0][[10, 12]])
        assert not t.target[0][0][[0, 1, 2, 3, 5, 7]].any()


def test_a_wanted_hole_fails_as_missing():
    with pair("shm") as t:
        push = t.p.push("k", digest=DIGEST)
        recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[3, 4]])
        push.advance([[-1, 10]])
        assert wait_for(t.d, recv.handle).status == "missing"
        assert wait_for(t.p, push.handle).status == "missing"


def test_retract_goes_on_where_nothing_was_packed():
    with pair("shm") as t:
        push = t.p.push("k", digest=DIGEST)
        push.advance([[1, 2, 3]])
        assert push.retract() == [0]
        recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[7, 8, 9]])
        push.advance([[4, 5, 6]])
        push.finish()
        assert wait_for(t.d, recv.handle).kind == "received"
        assert np.array_equal(t.target[0][1][[7, 8, 9]], t.source[0][1][[4, 5, 6]])


def test_cancel_frees_the_blocks_and_tells_p():
    with pair("shm") as t:
        push = t.p.push("k", digest=DIGEST)
        recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[3]])
        recv.cancel()
        assert wait_for(t.d, recv.handle).status == "cancelled"
        assert wait_for(t.p, push.handle).status == "cancelled"
        recv.cancel()
        push.advance([[1]])
        push.finish()
        again = t.d.receive(t.peer, "k2", digest=DIGEST, blocks=[[3]])
        other = t.p.push("k2", digest=DIGEST)
        other.advance([[5]])
        other.finish()
        assert wait_for(t.d, again.handle).kind == "received"


def test_a_dropped_handle_ends_its_transfer():
    with pair("shm") as t:
        push = t.p.push("k", digest=DIGEST)
        handle = push.handle
        del push
        gc.collect()
        assert wait_for(t.p, handle).status == "aborted"
        recv = t.d.receive(t.peer, "k2", digest=DIGEST, blocks=[[3]])
        handle = recv.handle
        del recv
        gc.collect()
        assert wait_for(t.d, handle).status == "cancelled"


def test_abort_reaches_d():
    with pair("shm") as t:
        recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[3]])
        push = t.p.push("k", digest=DIGEST)
        push.abort("the client left")
        event = wait_for(t.p, push.handle)
        assert (event.status, event.detail) == ("aborted", "the client left")
        assert wait_for(t.d, recv.handle).status == "aborted"


def test_expect_then_receive():
    with pair("shm") as t:
        claim = t.d.expect(t.peer, "k")
        push = t.p.push("k", digest=DIGEST)
        push.advance([[5]])
        push.finish()
        recv = claim.receive(digest=DIGEST, blocks=[[9]])
        assert recv.transfer == claim.transfer
        assert wait_for(t.d, recv.handle).kind == "received"
        with pytest.raises(ValueError, match="used or cancelled"):
            claim.receive(digest=DIGEST, blocks=[[1]])


def test_evict_ends_the_longest_waiting_unopened_push():
    with pair("shm") as t:
        pushes = [t.p.push(f"k{i}", digest=DIGEST) for i in range(3)]
        for push in pushes:
            push.advance([[1]])
            push.finish()
        t.p.evict(2)
        events = wait(t.p, 2)
        assert [(e.handle, e.status) for e in events] == [(p.handle, "evicted") for p in pushes[:2]]


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ([[64]], r"block 64 of group 0 is outside \[0, 64\)"),
        ([[-2]], "block -2"),
        ([[1, 1]], "given twice"),
        ([[2**40]], "does not fit"),
        ([[1], [2]], "2 groups, the cache has 1"),
    ],
)
def test_bad_destination_is_refused_at_the_call(blocks, text):
    with pair("shm") as t:
        with pytest.raises(ValueError, match=text):
            t.d.receive(t.peer, "k", digest=DIGEST, blocks=blocks)
        assert t.d.stats()["open_receives"] == 0
        t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[1]])


def test_other_bad_arguments():
    with pair("shm") as t:
        push = t.p.push("k", digest=DIGEST)
        with pytest.raises(kvpush.DuplicateKey, match="'k' is open"):
            t.p.push("k", digest=DIGEST)
        with pytest.raises(ValueError, match="digest of 0 bytes"):
            t.p.push("other", digest=b"")
        with pytest.raises(ValueError, match="key of 0 bytes"):
            t.p.push("", digest=DIGEST)
        with pytest.raises(ValueError, match="block 99"):
            push.advance([[99]])
        with pytest.raises(TypeError):
            push.advance([["x"]])
        with pytest.raises(kvpush.Unsupported, match="host memory"):
            push.advance([[1]], after=12345)
        first = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[3]])
        with pytest.raises(ValueError, match="block 3 of group 0 belongs to another open receive"):
            t.d.receive(t.peer, "k2", digest=DIGEST, blocks=[[3]])
        with pytest.raises(ValueError, match="not a peer"):
            t.d.receive("nobody", "k3", digest=DIGEST, blocks=[[4]])
        with pytest.raises(kvpush.PeerLost):
            t.d.disconnect("0" * 32)
        push.advance([[1]])
        push.finish()
        assert wait_for(t.d, first.handle).kind == "received"


def test_a_peer_that_is_gone_is_refused_at_the_call():
    with pair("shm") as t:
        for peer in ("0" * 32, t.peer):
            if peer == t.peer:
                t.p.disconnect(peer)
                wait(t.d, 1, kinds=("lost",))
            with pytest.raises(kvpush.PeerLost, match=peer):
                t.d.receive(peer, "k", digest=DIGEST, blocks=[[3]])
            with pytest.raises(kvpush.PeerLost):
                t.d.expect(peer, "k")
        with pytest.raises(kvpush.PeerLost):
            t.p.expect(t.peer, "k")  # P cannot receive over it


def test_a_claim_outlives_its_session_only_to_fail():
    with pair("shm") as t:
        claim = t.d.expect(t.peer, "k")
        t.p.disconnect(t.peer)
        wait(t.d, 1, kinds=("lost",))
        recv = claim.receive(digest=DIGEST, blocks=[[3]])
        # peer_lost: the goodbye overtook the claim on its way to the progress thread.
        assert wait_for(t.d, recv.handle).status in ("peer_closed", "peer_lost")


def test_queue_full_is_a_blocking_io_error():
    with pair("shm", config={"max_open_transfers": 2}) as t:
        first = t.p.push("a", digest=DIGEST)
        second = t.p.push("b", digest=DIGEST)
        with pytest.raises(BlockingIOError, match="max_open_transfers"):
            t.p.push("c", digest=DIGEST)
        first.abort()
        wait_for(t.p, first.handle)
        t.p.push("c", digest=DIGEST)
        assert second.key == "b"


def test_a_withdrawn_offer_gives_its_landing_back():
    with pair("shm", config={"slot_bytes": 1 << 20, "num_slots": 8, "landing_bytes": 16 << 20}) as t:
        offer = t.d.offer()
        busy = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[1]])
        with pytest.raises(MemoryError, match="landing_bytes"):
            t.d.offer()
        assert busy.key == "k"
        t.d.withdraw(offer)
        again = t.d.offer()
        t.p.answer(again)
        with pytest.raises(kvpush.HandshakeError, match="another engine"):
            t.p.withdraw(again)


def test_disconnect_fails_transfers_then_says_lost():
    with pair("shm") as t:
        recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[3]])
        t.d.disconnect(t.peer)
        events = wait(t.d, 2, kinds=("failed", "lost"))
        assert [(e.kind, e.status) for e in events] == [("failed", "peer_closed"), ("lost", "peer_closed")]
        assert events[0].handle == recv.handle
        assert wait(t.p, 1, kinds=("lost",))[0].peer == t.peer
        t.peer = t.d.establish(t.p.answer(t.d.offer()))
        push = t.p.push("k", digest=DIGEST)
        push.advance([[1]])
        push.finish()
        again = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[3]])
        assert wait_for(t.d, again.handle).kind == "received"


def test_close_ends_everything_once_then_raises():
    t = pair("shm")
    with t:
        push = t.p.push("k", digest=DIGEST)
        recv = t.d.receive(t.peer, "other", digest=DIGEST, blocks=[[3]])
        t.d.close()
        events = t.d.poll()
        assert [(e.kind, e.status) for e in events] == [
            ("failed", "engine_closed"),
            ("lost", "engine_closed"),
        ]
        assert events[0].handle == recv.handle
        with pytest.raises(kvpush.ClosedError):
            t.d.poll()
        with pytest.raises(kvpush.ClosedError):
            t.d.offer()
        t.p.close()
        assert push.handle in [e.handle for e in t.p.poll() if e.kind == "failed"]


def test_many_threads_submit_one_polls():
    with pair("shm", blocks=256, config={"slot_bytes": 4096, "num_slots": 2}) as t:
        handles: list = []

        def submit(first: int) -> None:
            for i in range(first, first + 16):
                push = t.p.push(f"k{i}", digest=DIGEST)
                recv = t.d.receive(t.peer, f"k{i}", digest=DIGEST, blocks=[[i]])
                push.advance([[255 - i]])
                push.finish()
                handles.append((push, recv))

        threads = [threading.Thread(target=submit, args=(first,)) for first in (0, 16, 32, 48)]
        for thread in threads:
            thread.start()
        events = wait(t.d, 64)
        for thread in threads:
            thread.join()
        assert {e.kind for e in events} == {"received"}
        assert len({e.handle for e in events}) == 64
        assert np.array_equal(t.target[0][2][:64], t.source[0][2][255 - np.arange(64)])


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.p.push(5, digest=DIGEST),
        lambda t: t.p.push(b"k", digest=DIGEST),
        lambda t: t.p.push("k", digest="text"),
        lambda t: t.d.expect(t.peer, None),
        lambda t: t.d.expect(5, "k"),
        lambda t: t.d.receive(t.peer, "k", digest=None, blocks=[[1]]),
        lambda t: t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[1]], first=[-1]),
        lambda t: t.d.expect(t.peer, "k").receive(digest="text", blocks=[[1]]),
    ],
)
def test_an_argument_of_a_wrong_type_is_a_type_error(call):
    with pair("shm") as t, pytest.raises(TypeError):
        call(t)


def test_a_key_that_is_no_text_is_refused():
    with pair("shm") as t:
        for call in (
            lambda: t.p.push("\ud800", digest=DIGEST),
            lambda: t.d.expect(t.peer, "\ud800"),
            lambda: t.d.receive(t.peer, "\ud800", digest=DIGEST, blocks=[[1]]),
        ):
            with pytest.raises(kvpush.InvalidArgument, match="surrogate"):
                call()


@pytest.mark.parametrize("timeout", [math.inf, 1e300])
def test_poll_waits_for_any_length_of_time(timeout):
    with pair("shm") as t:
        found: list = []
        thread = threading.Thread(target=lambda: found.extend(t.d.poll(timeout=timeout)))
        thread.start()
        t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[1]]).cancel()
        thread.join(30)
        assert [e.status for e in found] == ["cancelled"]
        for none in (math.nan, -1.0, -math.inf):
            assert t.d.poll(timeout=none) == []


def test_a_push_that_was_retracted_after_finish_is_aborted_when_dropped():
    with pair("shm") as t:
        push = t.p.push("k", digest=DIGEST)
        push.finish()
        push.retract()
        del push
        assert wait(t.p)[0].status == "aborted"


@pytest.mark.parametrize("handle", ["push", "claim", "receive"])
def test_a_handle_keeps_engine_and_arrays(handle):
    with pair("shm") as t:
        p, d = t.p, kvpush.Engine(cache([arrays()]))
        peer = d.establish(p.answer(d.offer()))
        made = {
            "push": lambda engine: engine.push("k", digest=DIGEST),
            "claim": lambda engine: engine.expect(peer, "k"),
            "receive": lambda engine: engine.expect(peer, "k").receive(digest=DIGEST, blocks=[[1]]),
        }[handle](d)
        alive = weakref.ref(d)
        del d
        gc.collect()
        assert alive() is not None
        del made
        gc.collect()
        assert alive() is None


def test_arrays_that_a_copy_may_still_touch_outlive_the_engine(monkeypatch):
    # Only a copy on a GPU goes on after close(): tests/cpp/test_cuda_packer.cpp.
    for in_use in (False, True):
        monkeypatch.setattr(kvpush.Engine, "cache_in_use", in_use)
        made = cache([arrays()])
        alive = weakref.ref(made)
        kvpush.Engine(made, kvpush.Config(transport="shm")).close()
        del made
        gc.collect()
        assert (alive() is not None) == in_use


_FORK = """
import os, sys, threading
import numpy as np
import kvpush
from engines import DIGEST, pair, wait_for

with pair("shm") as t:
    push = t.p.push("k", digest=DIGEST)
    recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[1]])
    # Waits inside the engine while the process forks.
    poller = threading.Thread(target=lambda: t.p.poll(timeout=1.0))
    poller.start()
    child = os.fork()
    if child == 0:
        for call in (t.d.stats, t.d.poll, push.finish, recv.cancel, lambda: t.p.push("q", digest=DIGEST)):
            try:
                call()
            except kvpush.ClosedError:
                continue
            os._exit(1)
        if not t.d.closed:
            os._exit(2)
        t.d.close()
        sys.exit(0)  # collects every engine and handle
    assert os.waitpid(child, 0)[1] == 0
    poller.join()
    push.advance([[5]])
    push.finish()
    assert wait_for(t.d, recv.handle).kind == "received"
    assert np.array_equal(t.target[0][0][1], t.source[0][0][5])
"""


def test_a_forked_child_leaves_its_parents_engines_alone(request):
    tests = request.path.parent
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORK], cwd=tests, capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr.decode()

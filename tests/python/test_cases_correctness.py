"""Faults that users of other engines reported, each as a condition and what kvpush shows: wrong KV (C)."""

import itertools
import threading

import numpy as np
import pytest
from case_tools import IN_FLIGHT, NEW, OLD, SMALL, SOAK, exchange, fill, long_test, push_all, until
from engines import DIGEST, TRANSPORTS, arrays, cache, pair, wait, wait_for

import kvpush


@pytest.mark.parametrize("first", range(9))
def test_case_c1_only_what_d_lacks_arrives(first):
    """D holds the first k of n blocks already."""
    n = 8
    with pair("shm") as t:
        source = np.random.default_rng(3).permutation(64)[:n]
        target = np.random.default_rng(4).permutation(64)[:n]
        push = t.p.push("k", digest=DIGEST)
        recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[target[first:]], first=[first])
        push.advance([source])
        push.finish()
        event = wait_for(t.d, recv.handle)
        assert event.kind == "received"
        assert event.bytes == (n - first) * sum(a[0].nbytes for a in t.source[0])
        for a, b in zip(t.source[0], t.target[0], strict=True):
            assert np.array_equal(b[target[first:]], a[source[first:]])
            assert not b[target[:first]].any()


def test_case_c2_another_prompt_is_refused_and_the_push_stays():
    """D's prompt is one token longer than P's: their digests differ."""
    with pair("shm") as t:
        push = t.p.push("k", digest=b"prompt")
        wrong = t.d.receive(t.peer, "k", digest=b"prompt+1", blocks=[[1]])
        assert wait_for(t.d, wrong.handle).status == "digest_mismatch"
        right = t.d.receive(t.peer, "k", digest=b"prompt", blocks=[[1]])
        push.advance([[5]])
        push.finish()
        assert wait_for(t.d, right.handle).kind == "received"
        assert np.array_equal(t.target[0][0][1], t.source[0][0][5])


def test_case_c2_p_holds_fewer_blocks_than_d_wants():
    with pair("shm") as t:
        push = t.p.push("k", digest=DIGEST)
        recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[1, 2]])
        push.advance([[5]])
        push.finish()
        assert wait_for(t.d, recv.handle).status == "missing"
        assert wait_for(t.p, push.handle).status == "missing"


def test_case_c3_keys_that_share_a_prefix():
    with pair("shm") as t:
        keys = ["req-1", "req-10", "req-1-0", "req", "req-1 "]
        pushes = {key: t.p.push(key, digest=key.encode()) for key in keys}
        recvs = {
            key: t.d.receive(t.peer, key, digest=key.encode(), blocks=[[i]]) for i, key in enumerate(keys)
        }
        for i, key in reversed(list(enumerate(keys))):
            pushes[key].advance([[40 + i]])
            pushes[key].finish()
        events = {e.key: e for e in wait(t.d, len(keys))}
        for i, key in enumerate(keys):
            assert events[key].kind == "received", events[key]
            assert events[key].handle == recvs[key].handle
            assert np.array_equal(t.target[0][0][i], t.source[0][0][40 + i])


@pytest.mark.parametrize("how", ["aborted", "evicted", "unclaimed"])
def test_case_c4_blocks_freed_before_d_asks(how):
    """P gave its blocks to another prompt before D asked for them."""
    with pair("shm", config={"unclaimed_timeout_s": 0.1} if how == "unclaimed" else None) as t:
        fill(t.source[0], slice(None), OLD)
        push = push_all(t.p, "k", [1, 2, 3])
        if how == "aborted":
            push.abort()
        elif how == "evicted":
            t.p.evict(1)
        assert wait_for(t.p, push.handle).status == how
        fill(t.source[0], slice(None), NEW)
        recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[7, 8, 9]])
        event = wait_for(t.d, recv.handle)
        assert (event.kind, event.status, event.bytes) == ("failed", how, 0)
        assert not any(a.any() for a in t.target[0])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_case_c4_blocks_freed_while_d_receives(transport):
    """The same with the transfer under way: nothing of the new content, wherever the abort falls."""
    with pair(transport, config=SMALL) as t:
        blocks = np.arange(60)
        partial = 0
        for i in range(200):
            fill(t.source[0], slice(None), OLD)
            fill(t.target[0], slice(None), 0)
            floor = t.p.stats()["boxes_sent"] + i % 4
            recv = t.d.receive(t.peer, f"k{i}", digest=DIGEST, blocks=[blocks])
            push = t.p.push(f"k{i}", digest=DIGEST)
            push.advance([blocks])
            until(t.p, lambda stats, floor=floor: stats["boxes_sent"] >= floor)
            push.abort()
            assert wait_for(t.p, push.handle).status == "aborted"
            fill(t.source[0], slice(None), NEW)
            assert wait_for(t.d, recv.handle).status == "aborted"
            assert all(((a == 0) | (a == OLD)).all() for a in t.target[0])
            partial += any(a.any() for a in t.target[0])
        assert partial > 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_case_c4_blocks_taken_back_and_reused(transport):
    """retract() has returned: P writes into the blocks, then goes on with others."""
    with pair(transport, config=SMALL) as t:
        positions = set()
        for i in range(200):
            fill(t.source[0], slice(None), OLD)
            floor = t.p.stats()["boxes_sent"] + i % 4
            recv = t.d.receive(t.peer, f"k{i}", digest=DIGEST, blocks=[range(30)])
            push = t.p.push(f"k{i}", digest=DIGEST)
            push.advance([range(30)])
            until(t.p, lambda stats, floor=floor: stats["boxes_sent"] >= floor)
            (kept,) = push.retract()
            positions.add(kept)
            fill(t.source[0], slice(0, 30), NEW)
            push.advance([range(30 + kept, 60)])
            push.finish()
            assert wait_for(t.d, recv.handle).kind == "received"
            assert wait_for(t.p, push.handle).kind == "sent"
            assert all((a[:30] == OLD).all() for a in t.target[0])
            fill(t.target[0], slice(None), 0)
        assert len(positions) > 1


@pytest.mark.parametrize("pack_threads", [0, 2])
def test_case_c5_read_right_after_completion(pack_threads):
    """D reads the blocks as soon as it has the event, thousands of times into the same few blocks."""
    with pair("shm", blocks=16, config={**SMALL, "pack_threads": pack_threads}) as t:
        source, target = [3, 9, 0, 12, 7, 5, 1, 15], [8, 2, 11, 4, 13, 6, 10, 14]
        for i in range(5000):
            fill(t.source[0], source, float(i + 1))
            recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[target])
            push = push_all(t.p, "k", source)
            event = wait_for(t.d, recv.handle)
            assert all((a[target] == i + 1).all() for a in t.target[0]), i
            assert event.boxes == 2
            assert wait_for(t.p, push.handle).kind == "sent"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_case_c6_keys_reused_and_no_crossed_completion(transport):
    """Four keys, in flight together, each used again as soon as both sides are done with it."""
    with pair(transport, config=SMALL) as t:
        values = itertools.count(1)
        seen = set()
        for i in range(500):
            started = {}
            for slot in np.random.default_rng(i).permutation(4).tolist():
                value = float(next(values))
                digest = b"%d" % value
                fill(t.source[0], [slot], value)
                recv = t.d.receive(t.peer, f"k{slot}", digest=digest, blocks=[[20 + slot]])
                push = push_all(t.p, f"k{slot}", [slot], digest)
                started[recv.handle] = (recv, push, slot, value)
            for event in wait(t.d, 4):
                recv, _, slot, value = started[event.handle]
                assert (event.kind, event.key, event.transfer) == ("received", f"k{slot}", recv.transfer)
                assert all((a[20 + slot] == value).all() for a in t.target[0])
                assert event.handle not in seen
                seen.add(event.handle)
            assert {e.handle for e in wait(t.p, 4)} == {push.handle for _, push, _, _ in started.values()}
        assert t.d.stats()["receives_done"] == t.p.stats()["pushes_sent"] == 2000


def test_case_c7_two_p_start_at_once_towards_one_d():
    """The same keys at both, begun by two threads at the same moment."""
    count = 32
    config = kvpush.Config(transport="shm", **SMALL)
    sources = [arrays(seed=1), arrays(seed=2)]
    target = [np.zeros_like(a) for a in sources[0]]
    ps = [kvpush.Engine(cache([planes]), config) for planes in sources]
    with ps[0], ps[1], kvpush.Engine(cache([target]), config) as d:
        peers = [d.establish(p.answer(d.offer())) for p in ps]
        assert peers[0] != peers[1]
        recvs = {}
        for i, which in itertools.product(range(count), range(2)):
            recv = d.receive(peers[which], f"k{i}", digest=b"%d" % i, blocks=[[which * count + i]])
            recvs[recv.handle] = recv, which
        line = threading.Barrier(2)
        pushes: list = [[], []]

        def prefill(which):
            line.wait()
            for i in range(count):
                pushes[which].append(push_all(ps[which], f"k{i}", [i], b"%d" % i))

        threads = [threading.Thread(target=prefill, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for event in wait(d, 2 * count):
            assert event.kind == "received"
            assert event.peer == peers[recvs.pop(event.handle)[1]]
        for thread in threads:
            thread.join()
        for p in ps:
            assert {e.kind for e in wait(p, count)} == {"sent"}
        for plane, array in enumerate(target):
            for which in range(2):
                got = array[which * count : (which + 1) * count]
                assert np.array_equal(got, sources[which][plane][:count])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_case_c8_a_tiny_ring_of_slots_wraps(transport, num_slots):
    """Three large transfers at once; copies end in any order."""
    config = {"slot_bytes": 4096, "num_slots": num_slots, "pack_threads": 4}
    with pair(transport, blocks=1024, config=config) as t:
        rng = np.random.default_rng(8)
        source, target = (rng.permutation(1024)[:900].reshape(3, 300) for _ in range(2))
        recvs = [t.d.receive(t.peer, f"k{i}", digest=DIGEST, blocks=[target[i]]) for i in range(3)]
        pushes = [push_all(t.p, f"k{i}", source[i]) for i in range(3)]
        assert [e.kind for e in wait(t.d, 3)] == ["received"] * 3
        assert [e.kind for e in wait(t.p, 3)] == ["sent"] * 3
        assert len(recvs) == len(pushes) == 3
        assert t.p.stats()["boxes_sent"] >= 3 * 300 * 3 * 256 // 4096
        for a, b in zip(t.source[0], t.target[0], strict=True):
            assert np.array_equal(b[target.ravel()], a[source.ravel()])
            assert not np.delete(b, target.ravel(), axis=0).any()
        until(t.p, lambda stats: stats["credits"] == num_slots)


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        (cache([arrays()], block_size=8), "block_size"),
        (cache([arrays(heads=4)]), "heads"),
        (cache([arrays(content=16)]), "content"),
        (cache([arrays(num_planes=4)]), "planes"),
        (cache([arrays(), arrays()]), "group.count"),
        (cache([arrays()], dtype="bfloat16"), "dtype"),
        (cache([arrays()], model="another"), "model"),
    ],
)
def test_case_c9_what_does_not_fit_is_refused_with_both_values(theirs, field):
    with kvpush.Engine(cache([arrays()])) as p, kvpush.Engine(theirs) as d:
        with pytest.raises(kvpush.HandshakeError, match=f"{field}.*theirs.*ours") as info:
            p.answer(d.offer())
        assert isinstance(info.value, ConnectionError)
        assert p.stats()["sessions"] == 0


def test_case_c9_rank_0_cannot_pair_with_rank_1():
    def rank(first_head):
        planes = [
            kvpush.Plane.from_array(a, name="layer.0", head_range=(first_head, first_head + 2))
            for a in arrays()
        ]
        return kvpush.Cache([kvpush.Group(block_size=4, planes=planes[:1])])

    with kvpush.Engine(rank(0)) as p, kvpush.Engine(rank(2)) as d:
        offer = d.offer()
        with pytest.raises(kvpush.HandshakeError, match="heads"):
            p.answer(offer)


def test_case_c11_bytes_moved_are_bytes_expected():
    with pair("shm", num_groups=2) as t:
        unit = [sum(a[0].nbytes for a in planes) for planes in t.source]
        push = t.p.push("k", digest=DIGEST)
        recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[list(range(10)), list(range(3))])
        push.advance([list(range(20, 30)), list(range(3))])
        push.finish()
        event = wait_for(t.d, recv.handle)
        assert event.bytes == 10 * unit[0] + 3 * unit[1]
        assert t.d.stats()["bytes_received"] == t.p.stats()["bytes_sent"] == event.bytes
        failed = t.d.receive(t.peer, "never", digest=DIGEST, blocks=[[1], []])
        failed.cancel()
        wait_for(t.d, failed.handle)
        assert t.d.stats()["receive_failures"] == {"cancelled": 1}


@long_test
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_case_c5_read_right_after_completion_in_any_order(transport):
    """Each block is read as soon as its event is there, with others of the batch still on their way."""
    num = SOAK or 2000
    with pair(transport, blocks=2 * IN_FLIGHT, config=SMALL) as t:
        sources, targets = list(range(IN_FLIGHT)), list(range(IN_FLIGHT, 2 * IN_FLIGHT))
        for first in range(0, num, IN_FLIGHT):
            for array in t.source[0]:
                array[sources] = np.arange(first + 1, first + 1 + IN_FLIGHT)[:, None, None, None]
            for i in exchange(t.p, t.d, t.peer, first, sources, targets):
                assert all((array[targets[i]] == first + i + 1).all() for array in t.target[0]), first

"""More faults that users of other engines reported: reuse, many at once, repeats. See docs/reliability.md."""

import gc
import itertools
import os
import threading
import time

import numpy as np
import pytest
from engines import DEADLINE_S, DIGEST, Pair, arrays, cache, pair, wait, wait_for

import kvpush

OLD, NEW = 1.0, 2.0
SMALL = {"slot_bytes": 4096, "num_slots": 2}


def fill(planes, blocks, value):
    for array in planes:
        array[blocks] = value


def push_all(engine, key, blocks, digest=DIGEST):
    push = engine.push(key, digest=digest)
    push.advance([blocks])
    push.finish()
    return push


def until(engine, condition):
    """Spins on statistics: for what has no event."""
    end = time.monotonic() + DEADLINE_S
    while not condition(stats := engine.stats()):
        assert time.monotonic() < end, stats


def probe(t: Pair, key: str, source: int, target: int):
    """One whole transfer over the same session: all that was sent before it has arrived."""
    push = push_all(t.p, key, [source])
    recv = t.d.receive(t.peer, key, digest=DIGEST, blocks=[[target]])
    assert wait_for(t.d, recv.handle).kind == "received"
    assert wait_for(t.p, push.handle).kind == "sent"
    until(t.p, lambda stats: stats["open_claims"] == 0)


# ---- correctness --------------------------------------------------------------------------------


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


def test_case_c4_blocks_freed_while_d_receives():
    """The same with the transfer under way: nothing of the new content, wherever the abort falls."""
    with pair("shm", config=SMALL) as t:
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


def test_case_c4_blocks_taken_back_and_reused():
    """retract() has returned: P writes into the blocks, then goes on with others."""
    with pair("shm", config=SMALL) as t:
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


def test_case_c6_keys_reused_and_no_crossed_completion():
    """Four keys, in flight together, each used again as soon as both sides are done with it."""
    with pair("shm", config=SMALL) as t:
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


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_case_c8_a_tiny_ring_of_slots_wraps(num_slots):
    """Three large transfers at once; copies end in any order."""
    config = {"slot_bytes": 4096, "num_slots": num_slots, "pack_threads": 4}
    with pair("shm", blocks=1024, config=config) as t:
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


# ---- failure and liveness -----------------------------------------------------------------------


def test_case_f1_a_thousand_aborts_of_d_leak_nothing():
    """D aborts after it registered, and P never finishes: the block is free at once, every time."""
    with pair("shm") as t:
        for i in range(1000):
            recv = t.d.receive(t.peer, f"k{i}", digest=DIGEST, blocks=[[3]])
            push = t.p.push(f"k{i}", digest=DIGEST)
            push.advance([[1]])
            recv.cancel()
            assert wait_for(t.d, recv.handle).status == "cancelled"
            assert wait_for(t.p, push.handle).status == "cancelled"
        until(t.p, lambda stats: stats["open_claims"] == 0)
        assert t.p.stats()["open_pushes"] == t.d.stats()["open_receives"] == 0
        until(t.p, lambda stats: stats["credits"] == kvpush.Config().num_slots)


def test_case_f2_blocks_reused_while_writes_are_in_flight():
    """D aborts in mid-transfer and gives its blocks to another prompt at once."""
    with pair("shm", config=SMALL) as t:
        fill(t.source[0], slice(None), OLD)
        blocks = np.arange(60)
        for i in range(200):
            floor = t.d.stats()["boxes_received"] + i % 4
            recv = t.d.receive(t.peer, f"k{i}", digest=DIGEST, blocks=[blocks])
            push = t.p.push(f"k{i}", digest=DIGEST)
            push.advance([blocks])
            until(t.d, lambda stats, floor=floor: stats["boxes_received"] >= floor)
            recv.cancel()
            assert wait_for(t.d, recv.handle).status == "cancelled"
            fill(t.target[0], slice(None), NEW)
            assert wait_for(t.p, push.handle).status == "cancelled"
            probe(t, f"probe{i}", 0, 63)
            assert all((a[:60] == NEW).all() for a in t.target[0])


def test_case_f4_receives_that_wait_longer_than_a_push_without_a_claim():
    """128 on D wait past unclaimed_timeout_s; how long is told by a push that does expire."""
    count = 128
    with pair("shm", blocks=2 * count, config={"unclaimed_timeout_s": 0.1}) as t:
        early = [t.d.receive(t.peer, f"r{i}", digest=DIGEST, blocks=[[i]]) for i in range(count)]
        claims = [t.d.expect(t.peer, f"c{i}") for i in range(count)]
        until(t.p, lambda stats: stats["open_claims"] == 2 * count)
        claimed = [push_all(t.p, f"c{i}", [count + i]) for i in range(count)]
        nobody = push_all(t.p, "nobody", [0])
        assert wait_for(t.p, nobody.handle).status == "unclaimed"
        late = [c.receive(digest=DIGEST, blocks=[[count + i]]) for i, c in enumerate(claims)]
        waited = [push_all(t.p, f"r{i}", [i]) for i in range(count)]
        events = wait(t.d, 2 * count)
        assert {e.status for e in events} == {"ok"}
        assert {e.handle for e in events} == {r.handle for r in early + late}
        assert {e.handle for e in wait(t.p, 2 * count)} == {p.handle for p in claimed + waited}
        for a, b in zip(t.source[0], t.target[0], strict=True):
            assert np.array_equal(a, b)


@pytest.fixture
def both_ways():
    """Two engines that are P and D of each other."""
    planes = [arrays(seed=1), arrays(seed=2)]
    config = kvpush.Config(transport="shm")
    with kvpush.Engine(cache([planes[0]]), config) as a, kvpush.Engine(cache([planes[1]]), config) as b:
        yield a, b, a.establish(b.answer(a.offer())), b.establish(a.answer(b.offer())), planes


def rest(engine):
    """All events that are left when the engine closes."""
    engine.close()
    events = []
    try:
        while True:
            events += engine.poll()
    except kvpush.ClosedError:
        return events


def test_case_f12_one_key_pushed_and_received_by_one_engine(both_ways):
    """finish() twice on each: one end per handle, and each direction has its own KV."""
    a, b, a_peer, b_peer, planes = both_ways
    recvs = [
        engine.receive(peer, "k", digest=DIGEST, blocks=[[9]]) for engine, peer in ((a, a_peer), (b, b_peer))
    ]
    pushes = [push_all(engine, "k", [5]) for engine in (a, b)]
    for push in pushes:
        push.finish()
    for engine, push, recv in zip((a, b), pushes, recvs, strict=True):
        ends = {e.handle: e.kind for e in wait(engine, 2)}
        assert ends == {push.handle: "sent", recv.handle: "received"}
    for push, recv in zip(pushes, recvs, strict=True):
        push.finish()
        push.abort()
        recv.cancel()
        recv.cancel()
    assert all(np.array_equal(x[9], y[5]) for x, y in zip(*planes, strict=True))
    assert all(np.array_equal(y[9], x[5]) for x, y in zip(*planes, strict=True))
    assert {e.kind for engine in (a, b) for e in rest(engine)} <= {"lost"}


@pytest.mark.parametrize("order", ["push first", "receive first"])
def test_case_f12_abort_while_both_are_open(both_ways, order):
    a, b, a_peer, _, _ = both_ways
    push = a.push("k", digest=DIGEST)
    push.advance([[5]])
    recv = a.receive(a_peer, "k", digest=DIGEST, blocks=[[9]])
    calls = [push.abort, recv.cancel]
    for call in calls if order == "push first" else reversed(calls):
        call()
        call()
    push.finish()
    ends = {e.handle: e.status for e in wait(a, 2)}
    assert ends == {push.handle: "aborted", recv.handle: "cancelled"}
    assert {e.kind for engine in (a, b) for e in rest(engine)} <= {"lost"}


def test_case_f14_256_requests_through_two_slots():
    count = 256
    with pair("shm", blocks=count, config=SMALL) as t:
        recvs = [t.d.receive(t.peer, f"k{i}", digest=DIGEST, blocks=[[i]]) for i in range(count)]
        until(t.p, lambda stats: stats["open_claims"] == count)
        pushes = [push_all(t.p, f"k{i}", [count - 1 - i]) for i in range(count)]
        events = wait(t.d, count)
        assert {e.status for e in events} == {"ok"}
        # First come, first served.
        assert [e.handle for e in events] == [r.handle for r in recvs]
        assert [e.handle for e in wait(t.p, count)] == [p.handle for p in pushes]
        for a, b in zip(t.source[0], t.target[0], strict=True):
            assert np.array_equal(b, a[::-1])
        assert t.d.stats()["landing_bytes"] == SMALL["slot_bytes"] * SMALL["num_slots"]


# ---- cost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("source_order", ["straight", "shuffled"])
@pytest.mark.parametrize("target_order", ["straight", "shuffled", "backwards"])
def test_case_p1_operations_do_not_depend_on_the_block_tables(source_order, target_order):
    orders = {
        "straight": np.arange(256),
        "shuffled": np.random.default_rng(5).permutation(256),
        "backwards": np.arange(256)[::-1],
    }
    with pair("shm", blocks=256, num_planes=4, config={"slot_bytes": 16384, "num_slots": 4}) as t:
        recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[orders[target_order]])
        push = push_all(t.p, "k", orders[source_order])
        assert wait_for(t.d, recv.handle).kind == "received"
        assert wait_for(t.p, push.handle).kind == "sent"
        assert t.p.stats()["network_ops"] == 4 * 256 * 256 // 16384


def test_case_p2_operations_do_not_depend_on_the_number_of_blocks():
    """The same 400,000 bytes in 100 blocks and in 100,000."""
    ops = []
    for blocks in (100, 100_000):
        shape = {"blocks": blocks, "heads": 1, "tokens": 1, "content": 100_000 // blocks, "num_planes": 1}
        with pair("shm", **shape) as t:
            order = np.random.default_rng(6).permutation(blocks)
            recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[order])
            push = push_all(t.p, "k", order[::-1])
            event = wait_for(t.d, recv.handle)
            assert (event.kind, event.bytes) == ("received", 400_000)
            assert wait_for(t.p, push.handle).kind == "sent"
            assert np.array_equal(t.target[0][0][order], t.source[0][0][order[::-1]])
            ops.append(t.p.stats()["network_ops"])
    assert ops == [1, 1]


def handles():
    """Open descriptors, threads, and shared-memory mappings of this process."""
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mapped


def test_case_p3_peers_and_transfers_come_and_go():
    """300 sessions, ended by either side, with some 1,500 transfers; then engines that come and go too."""
    with pair("shm", config=SMALL) as t:
        t.d.disconnect(t.peer)
        for engine in (t.p, t.d):
            wait(engine, 1, kinds=("lost",))
        gc.collect()
        before = handles()
        for i in range(300):
            t.peer = t.d.establish(t.p.answer(t.d.offer()))
            for k in range(5):
                recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[k]])
                push = push_all(t.p, "k", [k])
                assert wait_for(t.d, recv.handle).kind == "received"
                assert wait_for(t.p, push.handle).kind == "sent"
            if i == 0:
                fds, threads, mapped = handles()
                assert fds > before[0]
                assert threads == before[1]
                assert mapped > before[2]
            leaver, other = (t.d, t.p) if i % 2 else (t.p, t.d)
            leaver.disconnect(t.peer)
            for engine in (leaver, other):
                wait(engine, 1, kinds=("lost",))
        for engine in (t.p, t.d):
            until(engine, lambda stats: not (stats["sessions"] or stats["landing_bytes"]))
            until(engine, lambda stats: not (stats["quarantined_bytes"] or stats["open_claims"]))
        assert handles() == before


def test_case_p3_engines_come_and_go():
    gc.collect()
    before = None
    for _ in range(30):
        with pair("shm", config=SMALL) as t:
            probe(t, "k", 1, 2)
        # A closed D keeps a landing that P has not let go of; it goes with the engine.
        del t
        gc.collect()
        before = before or handles()
    assert handles() == before

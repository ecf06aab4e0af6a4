"""Faults that users of other engines reported: loss, aborts, waits and bursts (F)."""

import time

import numpy as np
import pytest
from case_tools import NEW, OLD, SMALL, fill, probe, push_all, until
from engines import DIGEST, TRANSPORTS, arrays, cache, pair, wait, wait_for

import kvpush


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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_case_f1_a_thousand_aborts_of_d_leak_nothing(transport):
    """D aborts after it registered, and P never finishes: the block is free at once, every time."""
    with pair(transport) as t:
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_case_f2_blocks_reused_while_writes_are_in_flight(transport):
    """D aborts in mid-transfer and gives its blocks to another prompt at once."""
    with pair(transport, config=SMALL) as t:
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_case_f4_receives_that_wait_longer_than_a_push_without_a_claim(transport):
    """128 on D wait past unclaimed_timeout_s; how long is told by a push that does expire."""
    count = 128
    with pair(transport, blocks=2 * count, config={"unclaimed_timeout_s": 0.1}) as t:
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_case_f9_a_late_request_starts_the_push_of_an_idle_engine(transport):
    """P has nothing else to do when D's request arrives: nobody calls P meanwhile."""
    with pair(transport) as t:
        push = t.p.push("k", digest=DIGEST)
        push.advance([[5]])
        push.finish()
        assert t.p.poll(timeout=0.3) == []  # P is idle for a while; this is the condition, not a wait for it
        recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[1]])
        assert wait_for(t.d, recv.handle).kind == "received"
        assert wait_for(t.p, push.handle).kind == "sent"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("d_first", [True, False])
@pytest.mark.parametrize("gap_s", [0.0, 0.2])
def test_case_f10_d_before_p_and_after(transport, d_first, gap_s):
    with pair(transport) as t:

        def prefill():
            push = t.p.push("k", digest=DIGEST)
            push.advance([[5]])
            push.finish()
            return push

        def decode():
            return t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[1]])

        if d_first:
            recv = decode()
            t.d.poll(timeout=gap_s)
            push = prefill()
        else:
            push = prefill()
            t.p.poll(timeout=gap_s)
            recv = decode()
        assert wait_for(t.d, recv.handle).kind == "received"
        assert wait_for(t.p, push.handle).kind == "sent"


@pytest.mark.parametrize("expected_before", [True, False])
@pytest.mark.parametrize("push_first", [True, False])
def test_case_f11_d_needs_nothing(expected_before, push_first):
    """D has every block cached: it does not wait, and P's push ends at once."""
    with pair("shm") as t:
        push = t.p.push("k", digest=DIGEST) if push_first else None
        if expected_before:
            recv = t.d.expect(t.peer, "k").receive(digest=DIGEST, blocks=[[]])
        else:
            recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[-1, -1]])
        event = wait_for(t.d, recv.handle)
        assert (event.kind, event.bytes) == ("received", 0)
        if push is None:
            # P must know of the cancelled claim before it pushes: a second claim, in order, tells us so.
            probe = t.p.push("probe", digest=DIGEST)
            probe.advance([[1]])
            probe.finish()
            probe_recv = t.d.receive(t.peer, "probe", digest=DIGEST, blocks=[[2]])
            assert wait_for(t.d, probe_recv.handle).kind == "received"
            push = t.p.push("k", digest=DIGEST)
        assert wait_for(t.p, push.handle).status == "cancelled"


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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_case_f14_256_requests_through_two_slots(transport):
    count = 256
    with pair(transport, blocks=count, config=SMALL) as t:
        recvs = [t.d.receive(t.peer, f"k{i}", digest=DIGEST, blocks=[[i]]) for i in range(count)]
        until(t.p, lambda stats: stats["open_claims"] == count)
        pushes = [push_all(t.p, f"k{i}", [count - 1 - i]) for i in range(count)]
        events = wait(t.d, count)
        assert {e.status for e in events} == {"ok"}
        # First come, first served. NIXL's notices may overtake each other on their way to D.
        assert [e.handle for e in wait(t.p, count)] == [p.handle for p in pushes]
        if transport == "shm":
            assert [e.handle for e in events] == [r.handle for r in recvs]
        for a, b in zip(t.source[0], t.target[0], strict=True):
            assert np.array_equal(b, a[::-1])
        assert t.d.stats()["landing_bytes"] == SMALL["slot_bytes"] * SMALL["num_slots"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_case_f15_a_burst_of_messages_in_one_turn(transport):
    """P ends very many claims at once."""
    count = 20_000
    with pair(transport) as t:
        claims = [t.d.expect(t.peer, f"k{i}") for i in range(count)]
        pushes = [t.p.push(f"k{i}", digest=DIGEST) for i in range(count)]
        for push in pushes:
            push.finish()
        until = time.monotonic() + 30
        while t.p.stats()["open_claims"] < count:
            assert time.monotonic() < until
        t.p.evict(count)
        assert {e.status for e in wait(t.p, count)} == {"evicted"}
        last = claims[-1].receive(digest=DIGEST, blocks=[[1]])
        assert wait_for(t.d, last.handle).status == "evicted"
        assert t.p.stats()["sessions"] == t.d.stats()["sessions"] == 1

"""What several processes do to each other: under load, at once, and with writes on their way."""

import itertools
import signal

import pytest
from engines import TRANSPORTS
from states import SOURCE, TARGET, mid_boxes
from workers import (
    BLOCK_BYTES,
    BOUND_S,
    DEADLINE_S,
    NUM_SLOTS,
    Worker,
    connect,
    end,
    nothing_is_left,
    transfer,
    until,
)

_keys = (f"loss{i}" for i in itertools.count())
pytestmark = [pytest.mark.timeout(60), pytest.mark.parametrize("transport", TRANSPORTS)]


def test_case_c7_two_p_processes_start_at_once_towards_one_d(pool, transport):
    count = 16
    with pool.take(transport, "p", "p", "d") as (*ps, d):
        keys = [[next(_keys) for _ in range(count)] for _ in ps]
        targets = [list(range(which, 2 * count, 2)) for which in range(2)]
        sources = [list(range(first, first + count)) for first in (0, 32)]
        peers = [connect(p, d) for p in ps]
        for peer, their_keys, blocks in zip(peers, keys, targets, strict=True):
            d.receive_each(peer, their_keys, blocks)
        for p, their_keys, blocks in zip(ps, keys, sources, strict=True):
            p.start("push_each", their_keys, blocks)
        for p, their_keys, source, target in zip(ps, keys, sources, targets, strict=True):
            p.result()
            for key in their_keys:
                assert d.event(key, DEADLINE_S) == ("received", "ok")
                assert p.event(key, DEADLINE_S) == ("sent", "ok")
            assert d.blocks(target) == [block + 1 for block in source]
        nothing_is_left(d, num_sessions=2)
        for peer in peers:
            d.call("disconnect", peer)
        nothing_is_left(d)


def test_case_f2_cancelled_blocks_stay_as_scribbled(pool, transport):
    """D cancels and reuses its blocks while P, stopped, has yet to write into its slots."""
    with pool.take(transport, "p", "d") as (p, d):
        peer = connect(p, d)
        key = next(_keys)
        mid_boxes(p, d, peer, key)
        p.signal(signal.SIGSTOP)
        d.cancel(key)
        assert d.event(key, BOUND_S) == ("failed", "cancelled")
        d.scribble(TARGET, -1.0)
        p.start("advance", key, SOURCE[1:])
        p.signal(signal.SIGCONT)
        p.result()
        # "sent" when P packed the rest before it read the CANCEL.
        assert p.event(key, BOUND_S) in [("sent", "ok"), ("failed", "cancelled")]
        transfer(p, d, peer, next(_keys), [7, 8], [20, 21])
        assert d.blocks(TARGET) == [-1.0, -1.0]
        nothing_is_left(p, num_sessions=1)
        d.call("disconnect", peer)
        nothing_is_left(p)
        nothing_is_left(d)


def test_case_f6_d_dies_ten_times_under_load_and_the_other_is_served(pool, transport):
    num_pushes, num_others = 2 * NUM_SLOTS, 5 * NUM_SLOTS
    all_bytes = num_pushes * BLOCK_BYTES
    with pool.take(transport, "p", "d") as (p, d):
        peer = connect(p, d)
        failing = []
        upcoming = Worker(transport, is_source=False)
        try:
            for _ in range(10):
                doomed, upcoming = upcoming, Worker(transport, is_source=False)
                theirs = connect(p, doomed)
                keys = [next(_keys) for _ in range(num_pushes)]
                doomed.receive_each(theirs, keys, range(num_pushes))
                others = [next(_keys) for _ in range(num_others)]
                d.receive_each(peer, others, range(num_others))
                p.push_each(keys, range(num_pushes), False)
                until(lambda theirs=doomed: theirs.stats()["bytes_received"] == all_bytes, "boxes are in")
                p.start("push_each", others, range(20, 20 + num_others))
                doomed.kill()
                p.result()
                for key in others:
                    assert d.event(key, DEADLINE_S) == ("received", "ok")
                    assert p.event(key, DEADLINE_S) == ("sent", "ok")
                assert d.blocks(list(range(num_others))) == list(range(21, 21 + num_others))
                failing += keys
        finally:
            end(upcoming)
        for key in failing:
            assert p.event(key, BOUND_S)[0] == "failed"
        nothing_is_left(p, num_sessions=1)
        transfer(p, d, peer, next(_keys), [11, 12], [4, 5])
        d.call("disconnect", peer)
        nothing_is_left(p)
        nothing_is_left(d)

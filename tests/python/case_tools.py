"""What the tests of the cases share."""

import os
import time

import pytest
from engines import DEADLINE_S, DIGEST, Pair, wait, wait_for

OLD, NEW = 1.0, 2.0
SMALL = {"slot_bytes": 4096, "num_slots": 2}
IN_FLIGHT = 8  # transfers of one exchange()
# Transfers of a long test; 0: the few that a run of all tests can afford.
SOAK = int(os.environ.get("KVPUSH_SOAK", "0"))
long_test = pytest.mark.timeout(3600 if SOAK else 300)


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


def exchange(p, d, peer, first, sources, targets):
    """One transfer of one block per pair; the keys start at `first`. D's events, as they come."""
    keys = [f"k{first + i}" for i in range(len(sources))]
    recvs = [d.receive(peer, key, digest=DIGEST, blocks=[[b]]) for key, b in zip(keys, targets, strict=True)]
    pushes = [p.push(key, digest=DIGEST) for key in keys]
    for push, block in zip(pushes, sources, strict=True):
        push.advance([[block]])
        push.finish()
    by_handle = {recv.handle: i for i, recv in enumerate(recvs)}
    for _ in recvs:
        (event,) = wait(d)
        assert event.kind == "received", event
        yield by_handle.pop(event.handle)
    assert {event.kind for event in wait(p, len(pushes))} == {"sent"}

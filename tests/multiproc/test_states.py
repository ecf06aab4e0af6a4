"""A process is killed or stopped in every state of the protocol; the other ends everything and serves on."""

import itertools
import signal

import pytest
from engines import ONE_OF_EACH
from states import (
    D_STOPPED,
    P_STOPPED,
    PUSH_OPEN,
    SOURCE,
    STATES,
    TARGET,
    boxes_out_no_end,
    claimed,
    idle,
    received_no_done,
)
from workers import BOUND_S, connect, nothing_is_left, transfer

_keys = (f"k{i}" for i in itertools.count())
SCRIBBLE = -1.0
SPARE = [20, 21]

in_every_state = pytest.mark.parametrize("state", [pytest.param(s, id=s.__name__) for s in STATES])
over_every_transport = pytest.mark.parametrize("transport", ONE_OF_EACH)
pytestmark = pytest.mark.timeout(60)


def reach(state, p, d, peer):
    """A session that has served, now in this state; the transfer's key."""
    transfer(p, d, peer, next(_keys), [1], [1])
    nothing_is_left(p, num_sessions=1)
    key = next(_keys)
    state(p, d, peer, key)
    return key


def end_at_d(state, d, peer, key):
    """D's transfer ends in time; D writes into its blocks at once."""
    if state is claimed:
        assert d.is_lost(peer, BOUND_S)
        d.receive(peer, key, TARGET)
    if state not in (idle, received_no_done):
        # Boxes and END that lie in a stopped D's memory may still be a whole transfer.
        ends = {"received", "failed"} if state in D_STOPPED else {"failed"}
        assert d.event(key, BOUND_S)[0] in ends
    d.scribble(TARGET, SCRIBBLE)


def end_at_p(state, p, key):
    """P's push, if there is one, ends in time."""
    if state in PUSH_OPEN:
        assert p.event(key, BOUND_S)[0] == "failed"


@over_every_transport
@in_every_state
def test_case_f5_p_is_killed(pool, transport, state):
    with pool.take(transport, "p", "d", "p") as (p, d, again):
        peer = connect(p, d)
        key = reach(state, p, d, peer)
        p.kill()
        if state in D_STOPPED:
            d.signal(signal.SIGCONT)
        # The restarted P serves at once, whether or not D knows already that the old one is dead.
        peer_again = connect(again, d)
        transfer(again, d, peer_again, next(_keys), [7, 8], SPARE)
        end_at_d(state, d, peer, key)
        transfer(again, d, peer_again, next(_keys), [9, 10], SPARE)
        assert d.blocks(TARGET) == [SCRIBBLE] * 2
        transfer(again, d, peer_again, next(_keys), [11, 12], TARGET)
        nothing_is_left(d, num_sessions=1)
        d.call("disconnect", peer_again)
        nothing_is_left(d)
        nothing_is_left(again)


@over_every_transport
@in_every_state
def test_case_f6_d_is_killed(pool, transport, state):
    with pool.take(transport, "p", "d", "d") as (p, d, again):
        key = reach(state, p, d, connect(p, d))
        d.kill()
        if state in P_STOPPED:
            p.signal(signal.SIGCONT)
        peer = connect(p, again)
        transfer(p, again, peer, next(_keys), [7, 8], SPARE)
        end_at_p(state, p, key)
        nothing_is_left(p, num_sessions=1)
        transfer(p, again, peer, next(_keys), [9, 10], TARGET)
        again.call("disconnect", peer)
        nothing_is_left(p)
        nothing_is_left(again)


@over_every_transport
@in_every_state
def test_case_f7_p_stops_and_resumes(pool, transport, state):
    with pool.take(transport, "p", "d") as (p, d):
        peer = connect(p, d)
        key = reach(state, p, d, peer)
        if state not in P_STOPPED:
            p.signal(signal.SIGSTOP)
        if state in D_STOPPED:
            d.signal(signal.SIGCONT)
        end_at_d(state, d, peer, key)
        assert d.is_lost(peer, BOUND_S)
        writes_late = state in PUSH_OPEN and state is not boxes_out_no_end
        if writes_late:  # P finds this when it resumes, and as a rule before it hears that D has closed
            p.start("advance", key, SOURCE, False)
        p.signal(signal.SIGCONT)
        if writes_late:
            p.result()
        end_at_p(state, p, key)
        nothing_is_left(p)
        peer = connect(p, d)
        transfer(p, d, peer, next(_keys), [7, 8], SPARE)
        assert d.blocks(TARGET) == [SCRIBBLE] * 2
        transfer(p, d, peer, next(_keys), [9, 10], TARGET)
        nothing_is_left(d, num_sessions=1)
        d.call("disconnect", peer)
        nothing_is_left(d)
        nothing_is_left(p)


@over_every_transport
@in_every_state
def test_case_f7_d_stops_and_resumes(pool, transport, state):
    with pool.take(transport, "p", "d") as (p, d):
        peer = connect(p, d)
        key = reach(state, p, d, peer)
        if state not in D_STOPPED:
            d.signal(signal.SIGSTOP)
        if state in P_STOPPED:
            p.signal(signal.SIGCONT)
        end_at_p(state, p, key)
        assert p.is_lost(peer, BOUND_S)
        d.signal(signal.SIGCONT)
        end_at_d(state, d, peer, key)
        peer = connect(p, d)
        transfer(p, d, peer, next(_keys), [7, 8], SPARE)
        assert d.blocks(TARGET) == [SCRIBBLE] * 2
        transfer(p, d, peer, next(_keys), [9, 10], TARGET)
        nothing_is_left(d, num_sessions=1)
        d.call("disconnect", peer)
        nothing_is_left(d)
        nothing_is_left(p)

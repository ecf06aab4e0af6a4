"""Engines in processes that die, stop and come back."""

import signal
import time

import pytest
from workers import PEER_TIMEOUT_S, TRANSPORTS, Worker, connect, transfer, until, workers

# Silence is timed from the last message heard, and judged once per ping interval; the rest is the machine.
BOUND_S = 3 * PEER_TIMEOUT_S + 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("state", ["unheard", "waiting", "accepted", "partial"])
def test_case_f5_p_is_killed(transport, state):
    with workers(transport) as (p, d):
        peer = connect(p, d)
        transfer(p, d, peer, "before", [1], [1])
        if state == "accepted":
            p.push("k", [], False)
        elif state == "partial":
            p.push("k", [5], False)
        d.receive(peer, "k", [2, 3])
        if state != "unheard":
            until(lambda: p.stats()["open_claims"] == 1, "P has the claim")
        if state == "partial":
            until(lambda: d.stats()["boxes_received"] == 2, "the first box of two has come")
        p.kill()
        began = time.monotonic()
        assert d.event("k", BOUND_S)[0] == "failed"
        assert time.monotonic() - began < BOUND_S
        # A restarted P serves, into the very blocks that the dead one was to fill.
        again = Worker(transport, is_source=True)
        try:
            transfer(again, d, connect(again, d), "k", [7, 8], [2, 3])
            assert d.stats()["open_receives"] == 0
            until(lambda: d.stats()["quarantined_bytes"] == 0, "the dead P's landing comes back")
        finally:
            again.process.kill()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_case_f6_one_d_dies_and_the_other_is_served(transport):
    with workers(transport, num_d=2) as (p, doomed, d):
        peer = connect(p, d)
        theirs = connect(p, doomed)
        transfer(p, doomed, theirs, "warm", [1], [1])
        p.push("k", [5], False)
        doomed.receive(theirs, "k", [2, 3])
        until(lambda: doomed.stats()["boxes_received"] == 2, "the doomed D has the first of two blocks")
        doomed.kill()
        began = time.monotonic()
        transfer(p, d, peer, "other", [9, 10], [4, 5])
        assert p.event("k", BOUND_S)[0] == "failed"
        assert time.monotonic() - began < BOUND_S
        until(lambda: p.stats()["sessions"] == 1, "the dead D's session is gone")
        stats = p.stats()
        assert (stats["open_pushes"], stats["open_claims"], stats["leases_in_use"]) == (0, 0, 0)
        transfer(p, d, peer, "after", [11, 12], [4, 5])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("who", ["p", "d"])
def test_case_f7_a_peer_stops_and_resumes(transport, who):
    with workers(transport) as (p, d):
        peer = connect(p, d)
        transfer(p, d, peer, "before", [1], [1])
        p.push("k", [5], False)
        d.receive(peer, "k", [2, 3])
        until(lambda: d.stats()["boxes_received"] == 2, "the first box of two has come")
        stopped, runs = (p, d) if who == "p" else (d, p)
        stopped.signal(signal.SIGSTOP)
        try:
            assert runs.event("k", BOUND_S)[0] == "failed"
            held = d.blocks([2, 3]) if who == "p" else None
        finally:
            stopped.signal(signal.SIGCONT)
        assert stopped.event("k", BOUND_S)[0] == "failed"
        if held is not None:
            assert d.blocks([2, 3]) == held
        for side in (p, d):
            stats = side.stats()
            assert (stats["open_pushes"], stats["open_receives"], stats["sessions"]) == (0, 0, 0)
        # A key that failed is remembered by P: this is another one.
        transfer(p, d, connect(p, d), "after", [7, 8], [2, 3])

"""P and D on two hosts, as far as networks go: links that fail in mid-transfer, packets that get lost."""

import itertools
import random

import pytest
from engines import FABRICS
from states import SOURCE, TARGET, accepted, opened
from workers import BOUND_S, DEADLINE_S, connect, nothing_is_left, transfer, until

_keys = (f"link{i}" for i in itertools.count())
SCRIBBLE = -1.0
SPARE = [20, 21]
ENDS = [("received", "ok"), ("failed", "peer_lost"), ("failed", "peer_closed"), ("failed", "transport")]

over_networks = pytest.mark.parametrize("transport", [*FABRICS, pytest.param("nixl", marks=pytest.mark.nixl)])
pytestmark = pytest.mark.timeout(120)


def served_again(p, d, peer=""):
    """A new session, unless this one lives, serves; it leaves nothing behind on either side."""
    peer = peer or connect(p, d)
    transfer(p, d, peer, next(_keys), [7, 8], SPARE)
    transfer(p, d, peer, next(_keys), [9, 10], TARGET)
    nothing_is_left(d, num_sessions=1)
    nothing_is_left(p, num_sessions=1)
    d.call("disconnect", peer)
    nothing_is_left(d)
    nothing_is_left(p)


def end_both(p, d, key):
    """How they ended, P's push and D's receive."""
    received = d.event(key, DEADLINE_S)
    sent = p.event(key, DEADLINE_S)
    assert received in ENDS
    assert sent in [("sent", "ok"), *ENDS[1:]]
    return sent, received


def link_carries_again(p, d):
    """What each still had to say of its end has arrived.

    Until TCP tries again, a new session would have the same connection, and could be lost once more.
    """
    nothing_is_left(d)
    nothing_is_left(p)


def half_sent(p, d, peer, key):
    """The first block is in D; the second waits."""
    accepted(p, d, peer, key)
    before = d.stats()["boxes_received"]
    p.advance(key, SOURCE[:1], False)
    until(lambda: d.stats()["boxes_received"] > before, "D has the first block")


@over_networks
@pytest.mark.parametrize("state", [opened, accepted, half_sent])
def test_a_link_is_down_until_both_sides_know(network, transport, state):
    with network.pool.take(transport, "p", "d") as (p, d):
        peer = connect(p, d)
        transfer(p, d, peer, next(_keys), [1], [1])
        key = next(_keys)
        state(p, d, peer, key)
        network.set_link(0, up=False)
        if state is half_sent:
            p.advance(key, SOURCE[1:])
        assert d.event(key, BOUND_S)[0] == "failed"
        d.scribble(TARGET, SCRIBBLE)
        assert d.is_lost(peer, BOUND_S)
        assert p.is_lost(peer, BOUND_S)
        if state is not opened:
            # "sent" when all of it was packed before P knew.
            assert p.event(key, BOUND_S)[0] in ("sent", "failed")
        network.set_link(0, up=True)
        link_carries_again(p, d)
        peer = connect(p, d)
        transfer(p, d, peer, next(_keys), [3, 4], SPARE)
        assert d.blocks(TARGET) == [SCRIBBLE] * 2
        served_again(p, d, peer)


@over_networks
def test_a_link_is_down_for_a_moment(network, transport):
    with network.pool.take(transport, "p", "d") as (p, d):
        peer = connect(p, d)
        key = next(_keys)
        half_sent(p, d, peer, key)
        network.set_link(0, up=False)
        p.advance(key, SOURCE[1:])
        network.set_link(0, up=True)
        sent, received = end_both(p, d, key)
        if received == ("received", "ok"):
            assert sent == ("sent", "ok")
            assert d.blocks(TARGET) == [block + 1 for block in SOURCE]
        else:
            d.scribble(TARGET, SCRIBBLE)
            assert d.is_lost(peer, DEADLINE_S)
            assert p.is_lost(peer, DEADLINE_S)
            peer = ""
            link_carries_again(p, d)
        served_again(p, d, peer)


@over_networks
def test_the_kv_goes_over_the_link(network, transport):
    """Else the tests of this file would prove nothing: processes of one host know shorter ways."""
    with network.pool.take(transport, "p", "d") as (p, d):
        peer = connect(p, d)
        before, bytes_before = network.bytes_sent(0), d.stats()["bytes_received"]
        transfer(p, d, peer, next(_keys), list(range(32)), list(range(32, 64)))
        assert network.bytes_sent(0) - before > d.stats()["bytes_received"] - bytes_before > 0
        served_again(p, d, peer)


@over_networks
def test_a_link_flaps_under_load(network, transport):
    """Each third time it stays down until both sides know."""
    count = 16
    dice = random.Random(1)
    network.slow_down()
    with network.pool.take(transport, "p", "d") as (p, d):
        peer = ""
        for i in range(6):
            peer = peer or connect(p, d)
            keys = [next(_keys) for _ in range(count)]
            source, target = dice.sample(range(64), count), dice.sample(range(64), count)
            d.scribble(target, SCRIBBLE)
            d.receive_each(peer, keys, target)
            before = d.stats()["boxes_received"]
            p.push_each(keys, source)
            until(lambda before=before: d.stats()["boxes_received"] > before, "boxes arrive")
            for _ in range(1 + dice.randrange(3)):
                side = dice.choice("pd")
                network.set_link(0, up=False, side=side)
                if i % 3 == 2:
                    assert d.is_lost(peer, DEADLINE_S)
                    assert p.is_lost(peer, DEADLINE_S)
                    peer = ""
                network.set_link(0, up=True, side=side)
                if not peer:
                    break
            ends = [end_both(p, d, key) for key in keys]
            for block, into, (_, received) in zip(source, target, ends, strict=True):
                if received == ("received", "ok"):
                    assert d.blocks([into]) == [block + 1]
            if peer and any(received != ("received", "ok") for _, received in ends):
                assert d.is_lost(peer, DEADLINE_S)
                assert p.is_lost(peer, DEADLINE_S)
                peer = ""
            if not peer:
                link_carries_again(p, d)
        served_again(p, d, peer)


@over_networks
def test_p_dies_behind_a_link_that_is_down(network, transport):
    with network.pool.take(transport, "p", "d", "p") as (p, d, again):
        peer = connect(p, d)
        key = next(_keys)
        half_sent(p, d, peer, key)
        again.stats()  # it has started: an engine finds no interface that is down
        network.set_link(0, up=False)
        p.kill()
        assert d.event(key, BOUND_S)[0] == "failed"
        d.scribble(TARGET, SCRIBBLE)
        network.set_link(0, up=True)
        served_again(again, d)


@over_networks
def test_packets_that_get_lost_cost_time_only(lossy, transport):
    """5 ms each way, and one packet in a hundred is dropped."""
    with lossy.pool.take(transport, "p", "d") as (p, d):
        peer = connect(p, d)
        keys = [next(_keys) for _ in range(32)]
        d.receive_each(peer, keys, range(32, 64))
        p.push_each(keys, range(32))
        for key in keys:
            assert end_both(p, d, key) == (("sent", "ok"), ("received", "ok"))
        assert d.blocks(list(range(32, 64))) == list(range(1, 33))
        served_again(p, d, peer)


@pytest.mark.parametrize("transport", FABRICS)
def test_boxes_go_over_both_rails(rails, transport):
    with rails.pool.take(transport, "p", "d") as (p, d):
        peer = connect(p, d)
        before = [rails.bytes_sent(rail) for rail in range(2)]
        bytes_before = d.stats()["bytes_received"]
        transfer(p, d, peer, next(_keys), list(range(32)), list(range(32, 64)))
        received = d.stats()["bytes_received"] - bytes_before
        for rail in range(2):
            assert rails.bytes_sent(rail) - before[rail] > received / 4 > 0
        served_again(p, d, peer)


@pytest.mark.parametrize("transport", FABRICS)
@pytest.mark.parametrize("rail", range(2))
def test_one_rail_of_two_goes_down_in_mid_transfer(rails, transport, rail):
    """A link that is silent is no failed write: without its first rail a session is lost, as messages go
    there, and what waits on the second ends at progress_timeout_s.
    """
    blocks = list(range(32))
    with rails.pool.take(transport, "p", "d") as (p, d):
        peer = connect(p, d)
        key = next(_keys)
        d.receive(peer, key, blocks)
        before = d.stats()["boxes_received"]
        p.push(key, blocks[:8], False)
        until(lambda: d.stats()["boxes_received"] > before, "boxes arrive")
        rails.set_link(rail, up=False)
        p.advance(key, blocks[8:])
        received, sent = d.event(key, DEADLINE_S), p.event(key, DEADLINE_S)
        if received == ("received", "ok"):
            assert d.blocks(blocks) == [block + 1 for block in blocks]
        else:
            assert received[0] == "failed"
        assert sent[0] in ("sent", "failed")
        d.scribble(blocks, SCRIBBLE)
        if rail == 0:
            assert d.is_lost(peer, DEADLINE_S)
            assert p.is_lost(peer, DEADLINE_S)
        else:
            d.call("disconnect", peer)
        rails.set_link(rail, up=True)
        link_carries_again(p, d)
        assert d.blocks(blocks) == [SCRIBBLE] * len(blocks)
        served_again(p, d)

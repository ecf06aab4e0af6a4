"""Peers and engines that die, sleep, or are full."""

import pytest
from harness import Pair, Request, connect, tokens
from tiny import free_port

from kvpush.errors import ClosedError, PeerLost, QueueFull
from kvpush.vllm import handshake


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


def test_case_f15_a_full_queue_is_tried_again(pair: Pair) -> None:
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


def test_case_b4_another_model_is_refused_by_name(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.d.engine.fingerprint["model"] = "another"
    pair.p.engine.fingerprint["model"] = "this"
    d = pair.d_request(tokens(8), "k", ([20, 21],))
    pair.load(d)
    pair.d.step_until(lambda: pair.d.failed == [d.request_id])


def test_the_hello_of_p_comes_with_its_address_and_d_offers_by_it(pair: Pair) -> None:
    first_connect(pair)
    assert pair.d.engine.called("offer") == [(pair.p.engine.hello(),)]


def test_an_older_peer_that_sends_no_hello_is_offered_the_first_transport(pair: Pair) -> None:
    address = pair.p.worker.handshake_metadata()
    address.hello = b""
    pair.p.scheduler.shutdown()
    pair.p.scheduler.set_workers([address])
    first_connect(pair)
    assert pair.d.engine.called("offer") == [(None,)]


def test_a_slow_transport_is_replaced_before_the_first_request_and_the_faster_kept(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(handshake.logger, "log", lambda level, text, *args: told.append(text % args))
    pair.d.engine.rates = [("fabric", 0.01), ("nixl", 0.02), ("nixl", 0.02)]
    first_connect(pair)
    assert len(pair.d.engine.called("offer")) == 3
    assert len(pair.d.engine.called("disconnect")) == 2
    (line,) = told
    assert line.endswith("over nixl: 0.02 GB/s, below min_link_gb_per_s (0.5)")


def test_a_second_transport_that_fails_leaves_the_first(pair: Pair) -> None:
    pair.d.engine.rates = [("fabric", 0.01)]
    answers = [pair.p.engine.answer]
    # The second one fails.
    pair.p.engine.answer = lambda offer: answers.pop()(offer)
    first_connect(pair)
    assert not pair.d.engine.called("disconnect")
    assert len(pair.d.engine.called("withdraw")) == 1


def test_a_fast_transport_is_kept(pair: Pair) -> None:
    pair.d.engine.rates = [("fabric", 20.0)]
    first_connect(pair)
    assert len(pair.d.engine.called("offer")) == 1


def first_connect(pair: Pair) -> None:
    request = pair.d_request(tokens(4, 99), "warm-up", ([60],))
    pair.d.step()
    pair.d.step_until(lambda: bool(pair.d.engine.called("expect")))
    pair.d.abort(request)
    pair.d.step()

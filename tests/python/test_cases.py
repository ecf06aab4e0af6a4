"""Faults that users of other engines reported, each as a condition and what kvpush shows instead."""

import os
import time

import numpy as np
import pytest
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


@pytest.mark.parametrize("d_first", [True, False])
@pytest.mark.parametrize("gap_s", [0.0, 0.2])
def test_case_f10_d_before_p_and_after(d_first, gap_s):
    with pair("shm") as t:

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


@pytest.mark.parametrize("damage", ["truncate", "flip", "random", "empty", "version", "answer"])
def test_case_b4_offers_that_are_not_ours_are_refused(damage):
    with pair("shm") as t:
        offer = bytearray(t.d.offer())
        if damage == "truncate":
            offer = offer[:-5]
        elif damage == "flip":
            offer[40] ^= 1
        elif damage == "random":
            offer = bytearray(os.urandom(200))
        elif damage == "empty":
            offer = bytearray()
        elif damage == "version":
            offer[4] = 9
        else:
            offer = bytearray(t.p.answer(bytes(offer)))
        with pytest.raises(kvpush.HandshakeError, match="theirs 9, ours 1" if damage == "version" else None):
            t.p.answer(bytes(offer))
        assert t.p.stats()["sessions"] == 1 + (damage == "answer")


def test_case_b4_an_offer_need_not_be_text():
    """Bytes that are no UTF-8, in an offer that is otherwise sound."""
    with pair("shm") as t:
        head, found, tail = t.d.offer()[:-8].partition(b"shm")
        assert found
        content = head + b"\xff\xfe\xfd" + tail
        fnv = 0xCBF29CE484222325
        for byte in content:
            fnv = (fnv ^ byte) * 0x100000001B3 % (1 << 64)
        with pytest.raises(kvpush.HandshakeError, match="transport: theirs"):
            t.p.answer(content + fnv.to_bytes(8, "little"))


def test_an_answer_is_good_once_and_only_for_its_own_offer():
    with pair("shm") as t:
        offer = t.d.offer()
        answer = t.p.answer(offer)
        assert t.p.answer(offer) == answer
        t.d.establish(answer)
        with pytest.raises(kvpush.HandshakeError, match="answered before"):
            t.d.establish(answer)
        with pytest.raises(kvpush.HandshakeError, match="did not make"):
            t.p.establish(answer)
        with pytest.raises(kvpush.HandshakeError, match="own"):
            t.d.answer(t.d.offer())


def test_a_slot_below_the_largest_unit_is_refused_with_both_sizes():
    with pytest.raises(ValueError, match="slot_bytes is 4096.*8192"):
        kvpush.Engine(cache([arrays(heads=16, tokens=16)]), kvpush.Config(slot_bytes=4096))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_idle_pair_uses_less_than_one_percent_of_a_core(transport):
    with pair(transport):
        used = []
        while len(used) < 5 and min(used, default=1.0) >= 0.01:  # a busy neighbour makes a window dearer
            before = time.process_time()
            time.sleep(2)  # the measured time itself
            used.append((time.process_time() - before) / 2)
    assert min(used) < 0.01

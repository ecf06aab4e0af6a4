"""Faults that users of other engines reported: bad input (B), and what a hand-shake refuses."""

import os

import pytest
from engines import arrays, cache, pair

import kvpush


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

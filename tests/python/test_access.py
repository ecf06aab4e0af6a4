"""The shared secret between two engines: who gets through, who does not, and what they are told."""

import dataclasses

import pytest
from engines import DIGEST, Pair, arrays, cache, pair, wait

import kvpush
from kvpush import access

SECRET = "correct horse battery staple"
OTHER = "another horse battery staple"


def engine(secret: str) -> kvpush.Engine:
    return kvpush.Engine(cache([arrays()]), kvpush.Config(transport="shm", secret=secret))


@pytest.fixture
def engines():
    made: list[kvpush.Engine] = []

    def make(*secrets: str) -> list[kvpush.Engine]:
        made.extend(engine(secret) for secret in secrets)
        return made

    yield make
    for one in made:
        one.close()


def test_engines_with_one_secret_transfer():
    with pair("shm", config={"secret": SECRET}) as t:
        push = t.p.push("k", digest=DIGEST)
        recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[[3, 9]])
        push.advance([[7, 1]])
        push.finish()
        assert wait(t.d)[0].handle == recv.handle
        assert (t.target[0][0][[3, 9]] == t.source[0][0][[7, 1]]).all()
        offer = t.d.offer()
        assert t.p.answer(offer) == t.p.answer(offer)
        t.d.withdraw(offer)


def test_without_a_secret_bytes_are_as_they_were(engines):
    p, d = engines("", "")
    offer = d.offer()
    assert offer[:4] == b"kvpo"
    answer = p.answer(offer)
    assert answer[:4] == b"kvpa"
    d.establish(answer)


@pytest.mark.parametrize(
    ("p_secret", "d_secret", "text"),
    [
        (SECRET, "", "the offer is not signed and this side has a shared secret"),
        ("", SECRET, "the offer is signed with a shared secret and this side has none"),
        (SECRET, OTHER, "the offer is signed with another secret"),
    ],
)
def test_an_offer_without_the_proof_is_refused(engines, p_secret, d_secret, text):
    p, d = engines(p_secret, d_secret)
    offer = d.offer()
    with pytest.raises(kvpush.HandshakeError, match=text) as caught:
        p.answer(offer)
    assert "KVPUSH_SECRET" in str(caught.value)
    assert not any(secret and secret in str(caught.value) for secret in (SECRET, OTHER))
    assert p.stats()["sessions"] == 0
    d.withdraw(offer)


@pytest.mark.parametrize(
    ("p_secret", "d_secret", "text"),
    [
        ("", SECRET, "the answer is not signed"),
        (SECRET, "", "the answer is signed with a shared secret and this side has none"),
        (OTHER, SECRET, "the answer is signed with another secret"),
    ],
)
def test_an_answer_without_the_proof_is_refused(engines, p_secret, d_secret, text):
    """Somebody in the middle gets D's offer through, but cannot make the answer."""
    p, d = engines(p_secret, d_secret)
    offer = access.seal_offer(p_secret, access.unseal_offer(d_secret, d.offer()))
    with pytest.raises(kvpush.HandshakeError, match=text):
        d.establish(p.answer(offer))


def test_every_changed_byte_is_noticed(engines):
    p, d = engines(SECRET, SECRET)
    offer = d.offer()
    answer = p.answer(offer)
    for at in range(len(offer)):
        changed = bytearray(offer)
        changed[at] ^= 1
        with pytest.raises(kvpush.HandshakeError):
            p.answer(bytes(changed))
    for at in range(len(answer)):
        changed = bytearray(answer)
        changed[at] ^= 1
        with pytest.raises(kvpush.HandshakeError):
            d.establish(bytes(changed))
    for length in (0, 1, 3, 4, 5, 35, 36, 37, len(answer) - 1):
        with pytest.raises(kvpush.HandshakeError):
            p.answer(offer[:length])
        with pytest.raises(kvpush.HandshakeError):
            d.establish(answer[:length])
    d.establish(answer)


def test_an_answer_holds_for_its_offer_only(engines):
    p, d, e = engines(SECRET, SECRET, SECRET)
    first, second = d.offer(), d.offer()
    answer = p.answer(first)
    with pytest.raises(kvpush.HandshakeError, match="belongs to another question"):
        e.establish(answer)
    # Its session is under the signature: it cannot be turned into one of the second offer.
    session = slice(access.TAG_BYTES + 4 + 21, access.TAG_BYTES + 4 + 37)
    moved = answer[: session.start] + second[session] + answer[session.stop :]
    with pytest.raises(kvpush.HandshakeError, match="was altered"):
        d.establish(moved)
    # An offer is no answer, nor the other way round.
    with pytest.raises(kvpush.HandshakeError):
        d.establish(second)
    with pytest.raises(kvpush.HandshakeError):
        p.answer(answer)
    d.establish(answer)
    with pytest.raises(kvpush.HandshakeError):
        d.establish(answer)


def test_withdraw_takes_the_engine_s_own_offer_only(engines):
    d, e = engines(SECRET, SECRET)
    with pytest.raises(kvpush.HandshakeError, match="another engine's"):
        d.withdraw(e.offer())
    with pytest.raises(kvpush.HandshakeError, match="not signed"):
        d.withdraw(b"kvpo")


def test_one_engine_holds_eight_sessions_at_a_peer():
    with pair("shm", config={"slot_bytes": 1 << 16}) as t:

        def transfer(key: str) -> None:
            push = t.p.push(key, digest=DIGEST)
            recv = t.d.receive(t.peer, key, digest=DIGEST, blocks=[[3]])
            push.advance([[7]])
            push.finish()
            (event,) = wait(t.d)
            assert (event.handle, event.kind) == (recv.handle, "received")

        transfer("before")
        for offer in [t.d.offer() for _ in range(10)]:
            t.p.answer(offer)
        # Those that were never used gave way to later ones; the one in use did not.
        assert t.p.stats()["sessions_opened"] - t.p.stats()["sessions_ended"] == 8
        transfer("after")


def test_a_peer_with_more_claims_than_allowed_loses_its_session():
    source = [arrays()]
    p = kvpush.Engine(cache(source), kvpush.Config(transport="shm", max_open_transfers=2))
    d = kvpush.Engine(cache(source), kvpush.Config(transport="shm"))
    with Pair(p, d, source, source) as t:
        claims = [t.d.expect(t.peer, f"k{i}") for i in range(3)]
        (lost,) = wait(t.p, kinds=("lost",))
        assert (lost.status, lost.detail) == ("breach", "more than 2 claims at a time")
        assert [event.kind for event in wait(t.d, kinds=("lost",))] == ["lost"]
        assert len(claims) == 3


# --- the setting


def test_a_secret_is_never_shown():
    config = kvpush.Config.from_env({"KVPUSH_SECRET": SECRET})
    assert config.secret == SECRET
    assert SECRET not in repr(config) + str(config) + f"{config}"
    assert "secret" not in config.to_core()
    assert dataclasses.replace(config, num_slots=3).secret == SECRET
    with pytest.raises(kvpush.InvalidArgument) as caught:
        kvpush.Config(secret=SECRET, transport="none")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("bad", ["short", b"correct horse battery staple"])
def test_a_bad_secret_is_refused_without_being_shown(bad):
    with pytest.raises(kvpush.InvalidArgument, match="secret") as caught:
        kvpush.Config(secret=bad)
    assert str(bad) not in str(caught.value)


def test_a_proof_is_of_one_thing_in_one_context():
    sealed = access.seal(SECRET, "a", b"body", b"context")
    assert access.unseal(SECRET, "a", sealed, b"context") == b"body"
    for what, context in (("b", b"context"), ("a", b"contex"), ("a", b""), ("acontext", b"")):
        with pytest.raises(kvpush.HandshakeError):
            access.unseal(SECRET, what, sealed, context)
    # Moving bytes from one part to the next makes another input.
    assert access.seal(SECRET, "a", b"bc") != access.seal(SECRET, "a", b"c", b"b")


def test_the_proof_is_hmac_sha256():
    import hashlib
    import hmac

    head = b"".join(len(p).to_bytes(4, "little") + p for p in (b"kvps", b"offer", b""))
    expected = hmac.new(SECRET.encode(), head + b"x", hashlib.sha256).digest()
    assert access.seal_offer(SECRET, b"x") == b"kvps" + expected + b"x"
    assert access.tag_of(access.seal_offer(SECRET, b"x")) == expected
    assert access.tag_of(b"x" * 100) == b""

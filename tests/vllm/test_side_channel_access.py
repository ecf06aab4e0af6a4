"""Who the side channel listens to: the shared secret, and the limits of size and connections."""

import contextlib
import socket
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from kvpush.access import MAGIC as SEAL
from kvpush.access import TAG_BYTES, seal, tag_of
from kvpush.errors import InvalidArgument
from kvpush.vllm.side_channel import (
    MAGIC,
    MAX_MESSAGE_BYTES,
    MODE,
    PROTOCOL,
    Ask,
    OfferDesk,
    Reply,
    SideChannel,
    SideChannelError,
    ask,
)

TIMEOUT_S = 10.0
SECRET = "correct horse battery staple"
OTHER = "another horse battery staple"

Make = Callable[..., SideChannel]


@pytest.fixture
def make() -> Iterator[Make]:
    with contextlib.ExitStack() as made:

        def channel(secret: str, **options: int) -> SideChannel:
            desk = OfferDesk(lambda offer: b"answer to " + offer)
            one = SideChannel("127.0.0.1", 0, desk.answer, "test", secret=secret, **options)
            made.callback(one.close)
            return one

        yield channel


def asked(channel: SideChannel, secret: str, body: bytes = b"x") -> bytes:
    return ask("127.0.0.1", channel.port, "offer", body, TIMEOUT_S, secret=secret).body


def exchange(port: int, data: bytes) -> bytes:
    sock = zmq.Context.instance().socket(zmq.REQ)
    try:
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(f"tcp://127.0.0.1:{port}")
        sock.send(data)
        assert sock.poll(int(TIMEOUT_S * 1000))
        return sock.recv()
    finally:
        sock.close(linger=0)


@contextlib.contextmanager
def replies(reply: Callable[[bytes], bytes]) -> Iterator[int]:
    """Stand in for a listener: hands each question's bytes to `reply`; yields the port."""
    channel = SideChannel("127.0.0.1", 0, lambda _: b"", "fake", secret="")
    channel._handle = lambda frames: reply(frames[0])  # type: ignore[method-assign]
    try:
        yield channel.port
    finally:
        channel.close()


@pytest.mark.parametrize("secret", ["", SECRET])
def test_equal_secrets_are_served(make: Make, secret: str) -> None:
    assert asked(make(secret), secret) == b"answer to x"


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        (SECRET, "", "the question is not signed and this side has a shared secret"),
        ("", SECRET, "unsigned, it says: the question is signed with a shared secret and this side has none"),
        (SECRET, OTHER, "unsigned, it says: the question is signed with another secret"),
    ],
)
def test_other_secrets_are_refused_by_name(make: Make, ours: str, theirs: str, text: str) -> None:
    channel = make(ours)
    with pytest.raises(SideChannelError, match=text) as caught:
        asked(channel, theirs)
    assert "KVPUSH_SECRET" in str(caught.value)
    assert not any(secret and secret in str(caught.value) for secret in (SECRET, OTHER))
    assert asked(channel, ours) == b"answer to x"


def test_the_secret_comes_from_the_environment(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPUSH_SECRET", SECRET)
    channel = SideChannel("127.0.0.1", 0, OfferDesk(bytes).answer, "test")
    try:
        assert ask("127.0.0.1", channel.port, "offer", b"x", TIMEOUT_S).body == b"x"
        with pytest.raises(SideChannelError, match="not signed"):
            asked(channel, "")
    finally:
        channel.close()
    monkeypatch.setenv("KVPUSH_SECRET", "short")
    with pytest.raises(InvalidArgument, match="KVPUSH_SECRET"):
        ask("127.0.0.1", channel.port, "offer", b"x", TIMEOUT_S)


def test_a_reply_cannot_be_played_back(make: Make) -> None:
    channel = make(SECRET)
    seen: list[bytes] = []

    def record(question: bytes) -> bytes:
        seen.append(question)
        return exchange(channel.port, question)

    with replies(record) as port:
        assert ask("127.0.0.1", port, "offer", b"x", TIMEOUT_S, secret=SECRET).body == b"answer to x"
        again = ask("127.0.0.1", port, "offer", b"x", TIMEOUT_S, secret=SECRET)
    assert again.body == b"answer to x"
    # The same question twice differs, so the reply to one does not fit the other.
    assert len(set(seen)) == 2
    old = exchange(channel.port, seen[0])
    with replies(lambda _: old) as port, pytest.raises(SideChannelError, match="belongs to another question"):
        ask("127.0.0.1", port, "offer", b"x", TIMEOUT_S, secret=SECRET)


@pytest.mark.parametrize("what", ["unsigned", "forged", "altered", "question", "garbage"])
def test_what_is_not_the_peer_s_reply_is_refused(what: str) -> None:
    good = msgspec.msgpack.encode(Reply(MAGIC, PROTOCOL, MODE, body=b"evil"))

    def reply(question: bytes) -> bytes:
        sealed = seal(SECRET, "reply", good, tag_of(question))
        return {
            "unsigned": good,
            "forged": SEAL + bytes(TAG_BYTES) + good,
            "altered": sealed[:-1] + b"!",
            "question": question,
            "garbage": b"\xc1",
        }[what]

    with replies(reply) as port, pytest.raises(SideChannelError, match="signed|altered"):
        ask("127.0.0.1", port, "offer", b"x", TIMEOUT_S, secret=SECRET)


def test_refusals_of_a_signed_question_are_signed(make: Make) -> None:
    channel = make(SECRET)
    with pytest.raises(SideChannelError, match="refused: question 'workers' asked"):
        ask("127.0.0.1", channel.port, "workers", b"", TIMEOUT_S, secret=SECRET)
    question = seal(SECRET, "question", msgspec.msgpack.encode(Ask(MAGIC, 99, MODE, "offer")))
    assert exchange(channel.port, question).startswith(SEAL)


# --- limits


def test_a_message_has_a_largest_size(make: Make) -> None:
    channel = make("")
    assert len(asked(channel, "", bytes(MAX_MESSAGE_BYTES - 1000))) == MAX_MESSAGE_BYTES - 1000 + 10
    # ZeroMQ drops the connection; nobody answers.
    with pytest.raises(SideChannelError, match="did not answer"):
        ask("127.0.0.1", channel.port, "offer", bytes(MAX_MESSAGE_BYTES), 0.5, secret="")
    assert asked(channel, "") == b"answer to x"


def test_connections_have_a_limit(make: Make) -> None:
    """At one too many all are dropped, so that nobody can hold the listener for ever."""
    channel = make("", max_connections=4)
    with contextlib.ExitStack() as open_until:
        held = []
        for _ in range(5):
            held.append(socket.create_connection(("127.0.0.1", channel.port), timeout=TIMEOUT_S))
            open_until.enter_context(held[-1])
        for sock in held:
            with contextlib.suppress(ConnectionError):
                while sock.recv(100):
                    pass
        for _ in range(3):
            assert asked(channel, "") == b"answer to x"


@pytest.mark.parametrize("seed", range(3))
def test_a_flood_of_connections_is_survived(make: Make, seed: int) -> None:
    channel = make("", max_connections=4)
    for _ in range(5):
        with contextlib.ExitStack() as open_until:
            for _ in range(20 + seed):
                with contextlib.suppress(ConnectionError):
                    sock = socket.create_connection(("127.0.0.1", channel.port), timeout=TIMEOUT_S)
                    open_until.enter_context(sock)
        for _ in range(20):
            try:
                assert ask("127.0.0.1", channel.port, "offer", b"x", 1.0, secret="").body == b"answer to x"
                break
            except SideChannelError:
                continue  # dropped with the others
        else:
            pytest.fail("the listener does not come back")


def test_a_connection_that_says_nothing_is_dropped(make: Make) -> None:
    channel = make("")
    with socket.create_connection(("127.0.0.1", channel.port), timeout=3 * TIMEOUT_S) as sock:
        sock.settimeout(3 * TIMEOUT_S)
        while sock.recv(1000):
            pass
    assert asked(channel, "") == b"answer to x"

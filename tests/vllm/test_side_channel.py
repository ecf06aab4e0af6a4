"""The side channel under hostile and broken peers: the next valid one is served."""

import random
import socket
import struct
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from kvpush.vllm.params import BadParamsError
from kvpush.vllm.side_channel import (
    MAGIC,
    MAX_MESSAGE_BYTES,
    MODE,
    PROTOCOL,
    Ask,
    Directory,
    OfferDesk,
    Reply,
    SideChannel,
    SideChannelError,
    ask,
    side_channel_address,
)

TIMEOUT_S = 10.0


@pytest.fixture
def channel() -> Iterator[SideChannel]:
    directory = Directory("engine", 1, 1, [(0, "127.0.0.1", 7)])
    channel = SideChannel("127.0.0.1", 0, directory.answer, "test")
    yield channel
    channel.close()
    channel.close()


def works(channel: SideChannel) -> None:
    reply = ask("127.0.0.1", channel.port, "workers", b"", TIMEOUT_S)
    assert (reply.engine_id, reply.tp_size, reply.pp_size) == ("engine", 1, 1)
    assert [(w.rank, w.host, w.port) for w in reply.workers] == [(0, "127.0.0.1", 7)]


def raw(channel: SideChannel, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", channel.port), timeout=TIMEOUT_S) as sock:
        sock.sendall(data)


def payload(channel: SideChannel, *frames: bytes) -> Reply:
    context = zmq.Context.instance()
    sock = context.socket(zmq.REQ)
    try:
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(f"tcp://127.0.0.1:{channel.port}")
        sock.send_multipart(frames)
        assert sock.poll(int(TIMEOUT_S * 1000))
        return msgspec.msgpack.decode(sock.recv(), type=Reply)
    finally:
        sock.close(linger=0)


GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL" + bytes(16) + b"\x00" + bytes(31)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03REQ"


def test_a_valid_peer_is_served(channel: SideChannel) -> None:
    works(channel)


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes(channel: SideChannel, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        raw(channel, rng.randbytes(rng.choice([0, 1, 10, 64, 1000, 100_000])))
        raw(channel, GREETING + rng.randbytes(rng.choice([1, 9, 500])))
        raw(channel, GREETING + READY + rng.randbytes(rng.choice([1, 9, 500])))
    works(channel)


@pytest.mark.parametrize("length", range(1, len(GREETING + READY), 7))
def test_half_messages(channel: SideChannel, length: int) -> None:
    raw(channel, (GREETING + READY)[:length])
    works(channel)


@pytest.mark.parametrize("length", [MAX_MESSAGE_BYTES + 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_huge_lengths(channel: SideChannel, length: int) -> None:
    raw(channel, GREETING + READY + b"\x02" + struct.pack(">Q", length) + b"x" * 100)
    works(channel)


@pytest.mark.parametrize("seed", range(4))
def test_random_payloads_get_an_error_reply(channel: SideChannel, seed: int) -> None:
    rng = random.Random(seed)
    good = msgspec.msgpack.encode(Ask(MAGIC, PROTOCOL, MODE, "workers"))
    for _ in range(10):
        mutated = bytearray(good)
        mutated[rng.randrange(len(mutated))] ^= 1 << rng.randrange(8)
        for data in (rng.randbytes(rng.randrange(200)), good[: rng.randrange(len(good))], b"\x91" * 5000):
            assert payload(channel, data).error
        payload(channel, bytes(mutated))
    assert "one frame" in payload(channel, good, good).error
    works(channel)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Ask("other", PROTOCOL, MODE, "workers"), "'other' asked, this side has 'kvpush'"),
        (Ask(MAGIC, 99, MODE, "workers"), "protocol '99' asked, this side has 1"),
        (Ask(MAGIC, PROTOCOL, "pull", "workers"), "mode 'pull' asked, this side has 'push'"),
        (Ask(MAGIC, PROTOCOL, MODE, "offer", b"x"), "'workers' only"),
    ],
)
def test_refusals_name_both_values(channel: SideChannel, message: Ask, text: str) -> None:
    assert text in payload(channel, msgspec.msgpack.encode(message)).error
    works(channel)


def test_the_asker_names_a_refusal(channel: SideChannel) -> None:
    with pytest.raises(SideChannelError, match="mode 'pull' asked"):
        ask("127.0.0.1", channel.port, "workers", b"", TIMEOUT_S, mode="pull")


def test_a_peer_that_answers_garbage_is_an_error() -> None:
    channel = SideChannel("127.0.0.1", 0, lambda _: b"\xc1garbage", "test")
    try:
        with pytest.raises(SideChannelError, match=str(channel.port)):
            ask("127.0.0.1", channel.port, "workers", b"", TIMEOUT_S)
    finally:
        channel.close()


def test_an_unreachable_peer_is_an_error() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        with pytest.raises(SideChannelError, match="did not answer 'workers'"):
            ask("127.0.0.1", sock.getsockname()[1], "workers", b"", 0.05)


def test_a_slow_answer_delays_nobody_else() -> None:
    release = threading.Event()

    def answer(offer: bytes) -> bytes:
        if offer == b"slow":
            assert release.wait(TIMEOUT_S)
        if offer == b"bad":
            raise ValueError("refused: model is 'a' there and 'b' here")
        return b"answer to " + offer

    channel = SideChannel("127.0.0.1", 0, OfferDesk(answer).answer, "test")
    try:
        bodies: list[bytes] = []
        slow = threading.Thread(
            target=lambda: bodies.append(ask("127.0.0.1", channel.port, "offer", b"slow", TIMEOUT_S).body)
        )
        slow.start()
        assert ask("127.0.0.1", channel.port, "offer", b"quick", TIMEOUT_S).body == b"answer to quick"
        with pytest.raises(SideChannelError, match="model is 'a' there and 'b' here"):
            ask("127.0.0.1", channel.port, "offer", b"bad", TIMEOUT_S)
        release.set()
        slow.join()
        assert bodies == [b"answer to slow"]
    finally:
        release.set()
        channel.close()


def test_a_port_in_use_is_an_error_at_start_up(channel: SideChannel) -> None:
    with pytest.raises(OSError, match=rf"127.0.0.1:{channel.port}.*KVPUSH_SIDE_CHANNEL_PORT"):
        SideChannel("127.0.0.1", channel.port, lambda _: b"", "test")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_a_bad_host_is_an_error_at_start_up(host: str) -> None:
    with pytest.raises(OSError, match=host.replace(".", r"\.")):
        SideChannel(host, 0, lambda _: b"", "test")


def address(extra: dict[str, object], index: int = 0) -> tuple[str, int]:
    return side_channel_address(
        SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
            parallel_config=SimpleNamespace(data_parallel_index=index),
        )
    )


def test_where_the_address_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix in ("KVPUSH", "VLLM_NIXL"):
        for name in ("HOST", "PORT"):
            monkeypatch.delenv(f"{prefix}_SIDE_CHANNEL_{name}", raising=False)
    assert address({}) == ("localhost", 5600)
    assert address({}, 3) == ("localhost", 5603)
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "a")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "1000")
    assert address({}) == ("a", 1000)
    monkeypatch.setenv("KVPUSH_SIDE_CHANNEL_HOST", "b")
    monkeypatch.setenv("KVPUSH_SIDE_CHANNEL_PORT", "2000")
    assert address({}) == ("b", 2000)
    assert address({"side_channel_host": "c", "side_channel_port": 3000}, 1) == ("c", 3001)
    for bad in ("x", "-5", "70000", [1]):
        with pytest.raises(BadParamsError, match="KVPUSH_SIDE_CHANNEL_PORT"):
            address({"side_channel_port": bad})

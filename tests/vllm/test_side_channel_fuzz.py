"""The side channel against a seeded generator, over real sockets: after each batch a valid peer is served."""

import random
import socket
import struct
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from kvpush.access import MAGIC as SEAL
from kvpush.access import TAG_BYTES, seal
from kvpush.vllm.side_channel import MAGIC, MODE, PROTOCOL, Ask, Directory, Reply, SideChannel, ask

TIMEOUT_S = 10.0
SECRET = "correct horse battery staple"
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL" + bytes(16) + b"\x00" + bytes(31)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03REQ"


@pytest.fixture(params=["", SECRET], ids=["open", "secret"])
def channel(request: pytest.FixtureRequest) -> Iterator[SideChannel]:
    directory = Directory("engine", 1, 1, [(0, "127.0.0.1", 7)])
    channel = SideChannel("127.0.0.1", 0, directory.answer, "fuzz", secret=request.param)
    yield channel
    channel.close()


def works(channel: SideChannel) -> None:
    reply = ask("127.0.0.1", channel.port, "workers", b"", TIMEOUT_S, secret=channel._secret)
    assert reply.engine_id == "engine"


def value(rng: random.Random, depth: int = 0) -> object:
    """Return anything that msgpack can say."""
    kind = rng.randrange(9 if depth < 4 else 7)
    numbers = (0, -1, 1 << 31, -(1 << 63), (1 << 64) - 1)
    match kind:
        case 0:
            return None
        case 1:
            return rng.choice((True, False))
        case 2:
            return rng.choice(numbers)
        case 3:
            return rng.choice((0.0, float("nan"), float("inf"), -1e308))
        case 4:
            return rng.randbytes(rng.choice((0, 1, 300, 70_000)))
        case 5 | 6:
            return rng.choice((MAGIC, MODE, "workers", "offer", "", "\x00", "\ud7ff", "x" * 5000))
        case 7:
            return [value(rng, depth + 1) for _ in range(rng.randrange(5))]
        case _:
            return {str(value(rng, 4))[:20]: value(rng, depth + 1) for _ in range(rng.randrange(5))}


def mutated(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(out)) if out else 0
        match rng.randrange(5):
            case 0:
                out[at : at + 1] = rng.randbytes(1)
            case 1:
                out[at:at] = rng.randbytes(rng.choice((1, 4, 64)))
            case 2:
                del out[at : at + rng.randrange(1, 9)]
            case 3:
                del out[at:]
            case _:
                out[at : at + 4] = rng.choice((bytes(4), b"\xff" * 4, b"\xdd\xff\xff\xff"))
    return bytes(out)


def question(rng: random.Random) -> bytes:
    """Return an Ask whose fields may be of any type, perhaps damaged, perhaps signed."""
    fields: dict[str, object] = {
        "magic": MAGIC, "protocol": PROTOCOL, "mode": MODE, "what": "workers", "body": b"", "nonce": b"n",
    }  # fmt: skip
    for name in rng.sample(sorted(fields), rng.randrange(3)):
        if rng.random() < 0.3:
            del fields[name]
        else:
            fields[name] = value(rng)
    data = msgspec.msgpack.encode(fields)
    if rng.random() < 0.5:
        data = mutated(rng, data)
    match rng.randrange(4):
        case 0:
            return seal(SECRET, "question", data)
        case 1:
            return mutated(rng, seal(SECRET, "question", data))
        case 2:
            return SEAL + rng.randbytes(TAG_BYTES) + data
        case _:
            return data


def send_frames(channel: SideChannel, rng: random.Random, count: int) -> None:
    """Send whole ZeroMQ messages and take what comes back: each must get a reply, all replies must decode."""
    sock = zmq.Context.instance().socket(zmq.DEALER)
    try:
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(f"tcp://127.0.0.1:{channel.port}")
        for _ in range(count):
            frames = [question(rng) for _ in range(rng.choice((1, 1, 1, 2, 5)))]
            sock.send_multipart([b"", *frames])
            assert sock.poll(int(TIMEOUT_S * 1000))
            reply = sock.recv_multipart()[-1]
            if reply.startswith(SEAL):
                assert channel._secret
                reply = reply[len(SEAL) + TAG_BYTES :]
            assert msgspec.msgpack.decode(reply, type=Reply).magic == MAGIC
    finally:
        sock.close(linger=0)


def send_bytes(channel: SideChannel, rng: random.Random) -> None:
    """Send a stream that is almost ZMTP, and leave."""
    message = msgspec.msgpack.encode(Ask(MAGIC, PROTOCOL, MODE, "workers"))
    stream = GREETING + READY + b"\x01\x00" + b"\x00" + bytes([len(message)]) + message
    if rng.random() < 0.3:
        stream += b"\x02" + struct.pack(">Q", rng.choice((0, 1, 1 << 23, (1 << 63) - 1, (1 << 64) - 1)))
    with socket.create_connection(("127.0.0.1", channel.port), timeout=TIMEOUT_S) as sock:
        try:
            sock.sendall(mutated(rng, stream))
        except ConnectionError:
            return  # it has heard enough


@pytest.mark.parametrize("seed", range(6))
def test_generated_traffic(channel: SideChannel, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        send_frames(channel, rng, 25)
        works(channel)
        for _ in range(15):
            send_bytes(channel, rng)
        works(channel)

"""kvpush: pushes the KV cache of a prompt from a prefill engine to a decode engine.

Examples
--------
Two engines in one process, over shared memory::

    import kvpush
    import numpy as np

    def cache() -> kvpush.Cache:
        kv = np.zeros((16, 2, 32, 64), np.float32)  # [B, H, N, C]
        return kvpush.Cache([kvpush.Group(block_size=32, planes=[kvpush.Plane.from_array(kv)])])

    config = kvpush.Config(transport="shm")
    with kvpush.Engine(cache(), config) as p, kvpush.Engine(cache(), config) as d:
        peer = d.establish(p.answer(d.offer()))
        push = p.push("request-1", digest=b"tokens")
        recv = d.receive(peer, "request-1", digest=b"tokens", blocks=[[3, 9]])
        push.advance([[7, 1]])  # P's blocks 7 and 1 arrive in D's blocks 3 and 9
        push.finish()
        (event,) = d.poll(timeout=5.0)
        assert event.kind == "received"
"""

from kvpush._core import Claim, Event, Push, Receive
from kvpush._version import __version__
from kvpush.cache import Cache, Group, Plane
from kvpush.config import Config, find_nixl_library
from kvpush.engine import Engine, paths, transports
from kvpush.errors import (
    ClosedError,
    DuplicateKey,
    Exhausted,
    HandshakeError,
    InvalidArgument,
    KvpushError,
    PeerLost,
    QueueFull,
    TransportError,
    Unsupported,
)

__all__ = [
    "Cache",
    "Group",
    "Plane",
    "Config",
    "Engine",
    "Claim",
    "Event",
    "Push",
    "Receive",
    "find_nixl_library",
    "paths",
    "transports",
    "ClosedError",
    "DuplicateKey",
    "Exhausted",
    "HandshakeError",
    "InvalidArgument",
    "KvpushError",
    "PeerLost",
    "QueueFull",
    "TransportError",
    "Unsupported",
    "__version__",
]

"""Pairs of real engines over numpy caches, for tests."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable

import numpy as np
import pytest

import kvpush

DIGEST = b"\x11" * 32
DEADLINE_S = 30.0
TRANSPORTS = ["shm", pytest.param("nixl", marks=pytest.mark.nixl), "fabric"]


def arrays(
    num_planes: int = 3, blocks: int = 64, heads: int = 2, tokens: int = 4, content: int = 8, seed: int = 0
) -> list[np.ndarray]:
    """KV planes [B, H, N, C] of random float32, all bytes distinct enough to tell blocks apart."""
    rng = np.random.default_rng(seed)
    return [rng.random((blocks, heads, tokens, content), dtype=np.float32) for _ in range(num_planes)]


def cache(groups: Iterable[list[np.ndarray]], block_size: int = 4, **fingerprint: str) -> kvpush.Cache:
    return kvpush.Cache(
        [
            kvpush.Group(
                block_size=block_size,
                planes=[kvpush.Plane.from_array(a, name=f"g{g}.{i}") for i, a in enumerate(planes)],
            )
            for g, planes in enumerate(groups)
        ],
        fingerprint={"model": "test", "dtype": "float32", **fingerprint},
    )


@dataclasses.dataclass
class Pair:
    """P and D with an established session. `source[g]` and `target[g]` are their groups' planes."""

    p: kvpush.Engine
    d: kvpush.Engine
    source: list[list[np.ndarray]]
    target: list[list[np.ndarray]]
    peer: str = ""

    def __enter__(self) -> Pair:
        self.peer = self.d.establish(self.p.answer(self.d.offer()))
        return self

    def __exit__(self, *exc: object) -> None:
        self.d.close()
        self.p.close()


def pair(transport: str, num_groups: int = 1, config: dict | None = None, **shape: int) -> Pair:
    if transport != "shm" and (why := kvpush.transports()[transport]):
        pytest.skip(why)
    # The environment may name a libfabric.
    settings = kvpush.Config.from_env(transport=transport, **(config or {}))
    source = [arrays(seed=g, **shape) for g in range(num_groups)]
    target = [[np.zeros_like(a) for a in planes] for planes in source]
    return Pair(
        kvpush.Engine(cache(source), settings), kvpush.Engine(cache(target), settings), source, target
    )


_spare: weakref.WeakKeyDictionary[kvpush.Engine, list] = weakref.WeakKeyDictionary()


def wait(
    engine: kvpush.Engine, count: int = 1, kinds: tuple[str, ...] = ("sent", "received", "failed")
) -> list:
    """The next `count` events of these kinds, in order; others are dropped. Fails at a deadline."""
    found = _spare.setdefault(engine, [])
    while len(found) < count:
        events = engine.poll(timeout=DEADLINE_S)
        assert events, f"no event within {DEADLINE_S} s; have {found}; {engine.stats()}"
        found += [e for e in events if e.kind in kinds]
    _spare[engine] = found[count:]
    return found[:count]


def wait_for(engine: kvpush.Engine, handle: int):
    """The terminal event of one handle; others before it are dropped."""
    while True:
        event = wait(engine)[0]
        if event.handle == handle:
            return event

"""Pairs of real engines over numpy caches, for tests."""

from __future__ import annotations

import dataclasses
import functools
import os
import weakref
from collections.abc import Iterable
from typing import Any
from unittest import mock

import numpy as np
import pytest

import kvpush
from kvpush.config import fabric_libraries

DIGEST = b"\x11" * 32
DEADLINE_S = 30.0
# Each libfabric is a transport here: the system's and a wheel's, or the one that the environment names.
_LIBRARIES = fabric_libraries(os.environ.get("KVPUSH_FABRIC_LIBRARY", ""))
FABRICS = dict(zip(("fabric", "fabric_carried"), _LIBRARIES, strict=False))
# For what takes minutes over all: of several libfabrics the newest.
ONE_OF_EACH = ["shm", pytest.param("nixl", marks=pytest.mark.nixl), *list(FABRICS)[-1:]]
TRANSPORTS = ["shm", pytest.param("nixl", marks=pytest.mark.nixl), *FABRICS]


def settings(transport: str) -> dict[str, Any]:
    """The fields of kvpush.Config that choose it."""
    if transport in FABRICS:
        return {"transport": "fabric", "fabric_library": FABRICS[transport]}
    return {"transport": transport}


@functools.cache
def why_not(transport: str) -> str:
    """Why this machine has no such transport; "" if it has."""
    if transport not in FABRICS:
        return kvpush.transports()[transport]
    with mock.patch.dict(os.environ, KVPUSH_FABRIC_LIBRARY=FABRICS[transport]):
        return kvpush.transports()["fabric"]


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
    if why := why_not(transport):
        pytest.skip(why)
    whole = kvpush.Config(**{**settings(transport), **(config or {})})
    source = [arrays(seed=g, **shape) for g in range(num_groups)]
    target = [[np.zeros_like(a) for a in planes] for planes in source]
    return Pair(kvpush.Engine(cache(source), whole), kvpush.Engine(cache(target), whole), source, target)


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

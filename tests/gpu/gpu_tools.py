"""What tests do with a GPU, real or fake, in the same words. As a script: P in a process of its own."""

import contextlib
import ctypes
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvpush
import kvpush.config
from kvpush import _core

DIGEST = b"digest"
WAIT_S = 60.0
# For the fake driver, which plays the kernels whatever the file holds: this installation may have none.
KERNELS_VARIABLE = "KVPUSH_TEST_CUDA_KERNELS"


def use_kernels_of_test(set_attribute: Any = setattr) -> None:
    if path := os.environ.get(KERNELS_VARIABLE):
        set_attribute(kvpush.config, "cuda_kernels_path", lambda: path)


@dataclass(frozen=True)
class Array:
    """Bytes on the device that say of themselves where they are, as cupy's do."""

    buffer: Any
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": self.strides,
            "version": 3,
        }


class Gpu:
    """Memory through the driver that the engine uses too (KVPUSH_CUDA_LIBRARY)."""

    def buffer(self, num_bytes: int) -> Any:
        return _core.BenchBuffer(num_bytes, kvpush.Config.from_env().to_core())


class FakeGpu(Gpu):
    kind = "fake"
    reads = 300

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.fake_cuda_count.restype = ctypes.c_long
        library.fake_cuda_leaks.restype = ctypes.c_long

    def count(self, symbol: str) -> int:
        return int(self.library.fake_cuda_count(symbol.encode()))

    def slow_write(self, cache: "Cache", seed: int) -> "FakeWrite":
        """Work that lasts until end(), and then has filled the cache anew; `handle` is an event behind it."""
        return FakeWrite(self.library, cache, seed)


class FakeWrite:
    def __init__(self, library: ctypes.CDLL, cache: "Cache", seed: int) -> None:
        self._library, self._cache, self._seed = library, cache, seed
        self._context = self._made("cuDevicePrimaryCtxRetain", 0)
        with self._current():
            self._stream = self._made("cuStreamCreateWithPriority", 1, 0)
            self._event = self._made("cuEventCreate", 2)
            library.fake_cuda_hold(self._stream)
            self._call("cuEventRecord", self._event, self._stream)

    @property
    def handle(self) -> int:
        assert self._event.value is not None
        return self._event.value

    def end(self) -> None:
        """End the work, and the event: what waits for it was captured before."""
        self._cache.fill(self._seed)
        self._library.fake_cuda_release(self._stream)
        with self._current():
            self._call("cuEventDestroy_v2", self._event)
            self._call("cuStreamDestroy_v2", self._stream)
        self._call("cuDevicePrimaryCtxRelease_v2", 0)

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._library, name)(*args)
        assert code == 0, (name, code)

    def _made(self, name: str, *args: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(name, ctypes.byref(made), *args)
        return made

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        yield
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class RealGpu(Gpu):
    kind = "real"
    reads = 100_000

    def slow_write(self, cache: "Cache", seed: int) -> "RealWrite":
        return RealWrite(cache, seed)


class RealWrite:
    """A kernel that waits for about 0.2 s, and then a copy of the new content."""

    def __init__(self, cache: "Cache", seed: int) -> None:
        import torch

        target = torch.as_tensor(cache.whole(), device="cuda")
        content = torch.from_numpy(cache.random(seed)).cuda()
        self._event = torch.cuda.Event()
        torch.cuda._sleep(400_000_000)
        target.copy_(content)
        self._event.record()
        self.handle = int(self._event.cuda_event)

    def end(self) -> None:
        self._event.synchronize()


class Cache:
    """One group of planes [B, H, N, C], on the device or on the host, and its content as [planes, bytes]."""

    def __init__(
        self,
        gpu: Gpu | None,
        planes: int = 3,
        blocks: int = 24,
        heads: int = 2,
        tokens: int = 4,
        content: int = 64,
        order: str = "BHNC",
        offset: int = 0,
    ) -> None:
        sizes = {"B": blocks, "H": heads, "N": tokens, "C": content}
        strides, stride = {}, 1
        for axis in reversed(order):
            strides[axis] = stride
            stride *= sizes[axis]
        shape = tuple(sizes[axis] for axis in "BHNC")
        steps = tuple(strides[axis] for axis in "BHNC")
        self._plane_bytes = stride + 64  # never next to each other
        self._host = np.zeros(offset + planes * self._plane_bytes, np.uint8)
        self._buffer = gpu.buffer(len(self._host)) if gpu else None
        self._shape, self._steps, self._offset, self._planes = shape, steps, offset, planes
        self.num_blocks = blocks
        self.cache = kvpush.Cache(
            [
                kvpush.Group(
                    tokens, [kvpush.Plane.from_array(self._plane(i), name=f"l{i}") for i in range(planes)]
                )
            ]
        )

    def _begin(self, plane: int) -> int:
        return self._offset + plane * self._plane_bytes

    def _plane(self, index: int) -> Any:
        begin = self._begin(index)
        if self._buffer is not None:
            return Array(self._buffer, self._buffer.address + begin, self._shape, self._steps)
        return self._view(index)

    def _view(self, index: int) -> Any:
        return np.lib.stride_tricks.as_strided(self._host[self._begin(index) :], self._shape, self._steps)

    def fill(self, seed: int | None) -> None:
        """Random content, or zeros."""
        self._host[:] = 0 if seed is None else self.random(seed)
        if self._buffer is not None:
            self._buffer.upload(self._host)

    def random(self, seed: int) -> Any:
        """What fill(seed) fills in, [bytes]."""
        return np.random.default_rng(seed).integers(1, 256, len(self._host), np.uint8)

    def whole(self) -> Array:
        """All of the device's memory, [bytes]."""
        return Array(self._buffer, self._buffer.address, (len(self._host),), (1,))

    def blocks(self, ids: list[int]) -> Any:
        """The content of these blocks, [planes, ids, H, N, C]."""
        if self._buffer is not None:
            self._buffer.download(self._host)
        return np.stack([self._view(plane)[ids].copy() for plane in range(self._planes)])


def engine(cache: Cache, **config: Any) -> kvpush.Engine:
    return kvpush.Engine(cache.cache, kvpush.Config.from_env(transport="shm", **config))


def connect(p: kvpush.Engine, d: kvpush.Engine) -> str:
    return d.establish(p.answer(d.offer()))


def end_of(engine: kvpush.Engine, handle: int) -> Any:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        for event in engine.poll(timeout=0.2):
            if event.handle == handle:
                return event
    raise AssertionError(f"no event in {WAIT_S} s: {engine.stats()}")


def move(p: kvpush.Engine, d: kvpush.Engine, peer: str, key: str, sources: Any, targets: Any) -> None:
    recv = d.receive(peer, key, digest=DIGEST, blocks=[targets])
    push = p.push(key, digest=DIGEST)
    push.advance([sources])
    push.finish()
    event = end_of(d, recv.handle)
    assert (event.kind, event.status) == ("received", "ok"), event
    assert end_of(p, push.handle).kind == "sent"


def main() -> None:
    """P: takes an offer, pushes, waits to be told to end. One JSON object per line."""
    use_kernels_of_test()
    where, transport, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
    cache = Cache(Gpu() if where == "gpu" else None)
    cache.fill(seed)
    with kvpush.Engine(cache.cache, kvpush.Config.from_env(transport=transport)) as p:
        answer = p.answer(bytes.fromhex(json.loads(input())["offer"]))
        print(json.dumps({"answer": answer.hex()}), flush=True)
        sources = json.loads(input())["sources"]
        push = p.push("k", digest=DIGEST)
        push.advance([sources])
        push.finish()
        event = end_of(p, push.handle)
        print(json.dumps({"kind": event.kind}), flush=True)
        input()


if __name__ == "__main__":
    main()

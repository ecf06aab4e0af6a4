"""The cache of one end of an arm: memory of the host, or of a GPU."""

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvpush import _core
from kvpush.bench.tables import aligned_empty
from kvpush.config import Config

DEVICES = ("cpu", "cuda")


class HostMemory:
    """`num_bytes` of the host, each page touched by whoever fills it."""

    kind = "cpu"
    device = -1

    def __init__(self, num_bytes: int) -> None:
        self._bytes = aligned_empty(num_bytes)

    @property
    def address(self) -> int:
        """Of byte 0."""
        return int(self._bytes.ctypes.data)

    def __len__(self) -> int:
        return len(self._bytes)

    @contextlib.contextmanager
    def edit(self) -> Iterator[Any]:
        """Give the content, uint8 [bytes], to be read and changed."""
        yield self._bytes

    def part(self, begin: int, shape: tuple[int, ...]) -> Any:
        """Return an array of bytes of this shape, C order, from byte `begin` on."""
        size = 1
        for length in shape:
            size *= length
        return self._bytes[begin : begin + size].reshape(shape)

    def copy(self, to: int, source: "Memory", begin: int, num_bytes: int) -> None:
        """Copy bytes of `source` here, on one core."""
        ctypes.memmove(self.address + to, source.address + begin, num_bytes)


class CudaMemory:
    """`num_bytes` of GPU 0, allocated through the driver as the engine finds it (``KVPUSH_CUDA_LIBRARY``)."""

    kind = "cuda"
    device = 0

    def __init__(self, num_bytes: int) -> None:
        self.buffer = _core.BenchBuffer(num_bytes, Config.from_env().to_core())

    @property
    def address(self) -> int:
        """Of byte 0, on the device."""
        return int(self.buffer.address)

    def __len__(self) -> int:
        return int(self.buffer.num_bytes)

    @contextlib.contextmanager
    def edit(self) -> Iterator[Any]:
        """Give a copy of the content, uint8 [bytes], which replaces it in the end."""
        content = aligned_empty(len(self))
        self.buffer.download(content)
        yield content
        self.buffer.upload(content)

    def part(self, begin: int, shape: tuple[int, ...]) -> Any:
        """Return what says of itself, as cupy's arrays do, where these bytes are."""
        return _CudaArray(self.address + begin, shape)

    def copy(self, to: int, source: "Memory", begin: int, num_bytes: int) -> None:
        """Copy bytes of `source`, on the same device, as the driver does; returns when they are there."""
        assert isinstance(source, CudaMemory)
        self.buffer.copy(to, source.buffer, begin, num_bytes)


@dataclass(frozen=True)
class _CudaArray:
    address: int
    shape: tuple[int, ...]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": "|u1", "data": (self.address, False), "version": 3}


Memory = HostMemory | CudaMemory


def allocate(device: str, num_bytes: int) -> Memory:
    """Return memory of "cpu" or "cuda"."""
    return CudaMemory(num_bytes) if device == "cuda" else HostMemory(num_bytes)

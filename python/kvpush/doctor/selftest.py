"""A short real transfer over one transport: two engines in this process, bytes compared, GB/s taken.

``kvpush doctor`` runs it as ``python -m kvpush.doctor.selftest NAME [gpu]``, in a process of its own: a
broken driver or library may hang or crash, and the doctor has to outlive that.
"""

import ctypes
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import kvpush

NUM_BLOCKS = 1024
UNIT_SHAPE = (1, 16, 512)  # heads, tokens, bytes per head and token: 8 KiB per block
ROUNDS = 5
DEADLINE_S = 10.0


@dataclass(frozen=True)
class Result:
    """How a self-test went. ``gb_per_s`` is the best of the rounds, 0 on failure."""

    ok: bool
    error: str = ""
    gb_per_s: float = 0.0
    bytes_per_round: int = 0
    network_ops_per_round: int = 0


class _HostArray:
    """Bytes with a shape: what numpy would give, without needing numpy."""

    def __init__(self, content: bytearray) -> None:
        self._content = content
        self._exported = (ctypes.c_char * len(content)).from_buffer(content)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return _interface(ctypes.addressof(self._exported))

    def read(self) -> bytes:
        """Return the content."""
        return bytes(self._content)


class _GpuArray:
    """The same in the memory of GPU 0, as cupy would give it."""

    def __init__(self, content: bytearray, config: "kvpush.Config") -> None:
        from kvpush import _core

        self._buffer = _core.BenchBuffer(len(content), config.to_core())
        self._buffer.upload(content)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return _interface(self._buffer.address)

    def read(self) -> bytes:
        """Return the content."""
        content = bytearray(self._buffer.num_bytes)
        self._buffer.download(content)
        return bytes(content)


def _interface(address: int) -> dict[str, Any]:
    return {"version": 3, "typestr": "|u1", "shape": (NUM_BLOCKS, *UNIT_SHAPE), "data": (address, False)}


def run(transport: str, on_gpu: bool = False) -> Result:
    """Push half of a scattered cache a few times and compare every byte. Never raises."""
    try:
        return _run(transport, on_gpu)
    except Exception as error:
        return Result(False, f"{type(error).__name__}: {error}")


def _run(transport: str, on_gpu: bool) -> Result:
    import kvpush

    config = kvpush.Config.from_env(transport=transport)
    source, target = (
        _GpuArray(content, config) if on_gpu else _HostArray(content)
        for content in (_random_bytes(1), _random_bytes(2))
    )
    with _engine(source, config) as p, _engine(target, config) as d:
        peer = d.establish(p.answer(d.offer()))
        order = random.Random(0)
        best_s, ops = float("inf"), 0
        for round_number in range(ROUNDS):
            sources = order.sample(range(NUM_BLOCKS), NUM_BLOCKS // 2)
            targets = order.sample(range(NUM_BLOCKS), NUM_BLOCKS // 2)
            before = target.read()
            started = time.perf_counter()
            ops = _transfer(p, d, peer, f"selftest-{round_number}", sources, targets)
            best_s = min(best_s, time.perf_counter() - started)
            problem = _compare(source.read(), before, target.read(), sources, targets)
            if problem:
                return Result(False, problem)
    num_bytes = NUM_BLOCKS // 2 * _unit_bytes()
    return Result(True, "", num_bytes / best_s / 1e9, num_bytes, ops)


def _engine(array: Any, config: "kvpush.Config") -> "kvpush.Engine":
    import kvpush

    plane = kvpush.Plane.from_array(array, name="selftest")
    group = kvpush.Group(block_size=UNIT_SHAPE[1], planes=[plane])
    return kvpush.Engine(kvpush.Cache([group], fingerprint={"model": "selftest"}), config)


def _transfer(p: Any, d: Any, peer: str, key: str, sources: list[int], targets: list[int]) -> int:
    """Move the blocks and return the number of network operations."""
    push = p.push(key, digest=b"selftest")
    receive = d.receive(peer, key, digest=b"selftest", blocks=[targets], first=[0])
    push.advance([sources])
    push.finish()
    deadline = time.monotonic() + DEADLINE_S
    waiting = {"push", "receive"}
    boxes = 0
    while waiting:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no end after {DEADLINE_S:.0f} s; waiting for {sorted(waiting)}")
        for event in [*p.poll(timeout=0.0), *d.poll(timeout=0.001)]:
            if event.kind in ("failed", "lost"):
                raise RuntimeError(f"{event.kind}: {event.status} {event.detail}".rstrip())
            waiting.discard(event.side)
            if event.kind == "received":
                boxes = event.boxes
    del receive  # kept until here: dropping a handle early cancels the transfer
    return boxes


def _compare(source: bytes, before: bytes, after: bytes, sources: list[int], targets: list[int]) -> str:
    size = _unit_bytes()
    origin = dict(zip(targets, sources, strict=True))
    for block in range(NUM_BLOCKS):
        place = slice(block * size, (block + 1) * size)
        if block in origin:
            wanted = source[origin[block] * size : (origin[block] + 1) * size]
            if after[place] != wanted:
                return f"block {block} does not hold what block {origin[block]} of the source holds"
        elif after[place] != before[place]:
            return f"block {block} was changed, but is no part of the transfer"
    return ""


def _random_bytes(seed: int) -> bytearray:
    return bytearray(random.Random(seed).randbytes(NUM_BLOCKS * _unit_bytes()))


def _unit_bytes() -> int:
    heads, tokens, content = UNIT_SHAPE
    return heads * tokens * content


if __name__ == "__main__":
    print(json.dumps(asdict(run(sys.argv[1], on_gpu="gpu" in sys.argv[2:]))))

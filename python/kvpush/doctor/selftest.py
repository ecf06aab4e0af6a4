"""A short real transfer over one transport: two engines in this process, bytes compared, GB/s taken.

``kvpush doctor`` runs it as ``python -m kvpush.doctor.selftest NAME``, in a process of its own: a broken
driver or library may hang or crash, and the doctor has to outlive that.
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
DEADLINE_S = 30.0


@dataclass(frozen=True)
class Result:
    """How a self-test went. ``gb_per_s`` is the best of the rounds, 0 on failure."""

    ok: bool
    error: str = ""
    gb_per_s: float = 0.0
    bytes_per_round: int = 0
    network_ops_per_round: int = 0


class _Array:
    """Bytes with a shape: what numpy would give, without needing numpy."""

    def __init__(self, content: bytearray) -> None:
        self._exported = (ctypes.c_char * len(content)).from_buffer(content)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (NUM_BLOCKS, *UNIT_SHAPE),
            "data": (ctypes.addressof(self._exported), False),
        }


def run(transport: str) -> Result:
    """Push half of a scattered cache a few times and compare every byte. Never raises."""
    try:
        return _run(transport)
    except Exception as error:
        return Result(False, f"{type(error).__name__}: {error}")


def _run(transport: str) -> Result:
    import kvpush

    source, target = _random_array(1), _random_array(2)
    config = kvpush.Config.from_env(transport=transport)
    with _engine(source, config) as p, _engine(target, config) as d:
        peer = d.establish(p.answer(d.offer()))
        order = random.Random(0)
        best_s, ops = float("inf"), 0
        for round_number in range(ROUNDS):
            sources = order.sample(range(NUM_BLOCKS), NUM_BLOCKS // 2)
            targets = order.sample(range(NUM_BLOCKS), NUM_BLOCKS // 2)
            before = bytes(target)
            started = time.perf_counter()
            ops = _transfer(p, d, peer, f"selftest-{round_number}", sources, targets)
            best_s = min(best_s, time.perf_counter() - started)
            problem = _compare(bytes(source), before, bytes(target), sources, targets)
            if problem:
                return Result(False, problem)
    num_bytes = NUM_BLOCKS // 2 * _unit_bytes()
    return Result(True, "", num_bytes / best_s / 1e9, num_bytes, ops)


def _engine(array: bytearray, config: "kvpush.Config") -> "kvpush.Engine":
    import kvpush

    plane = kvpush.Plane.from_array(_Array(array), name="selftest")
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


def _random_array(seed: int) -> bytearray:
    return bytearray(random.Random(seed).randbytes(NUM_BLOCKS * _unit_bytes()))


def _unit_bytes() -> int:
    heads, tokens, content = UNIT_SHAPE
    return heads * tokens * content


if __name__ == "__main__":
    print(json.dumps(asdict(run(sys.argv[1]))))

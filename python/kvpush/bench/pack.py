"""``kvpush bench pack``: pack and unpack alone, through the packer that engines use, beside memcpy."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvpush import _core
from kvpush.bench.arm_kvpush import make_cache
from kvpush.bench.cases import MIB, Case
from kvpush.bench.memory import Memory, allocate
from kvpush.bench.pair import BenchError
from kvpush.bench.tables import block_spans, compare, fill_source, make_batches, poison
from kvpush.config import Config

# As an engine's by default: the slots of a session's landing, and so the boxes of it that are copied at once.
BOX_BYTES = MIB
IN_FLIGHT = 8


def run(
    cases: Sequence[Case],
    threads: Sequence[int],
    rounds: int,
    progress: Callable[[int, int, str], None] = lambda done, of, text: None,
    device: str = "cpu",
    boxes: Sequence[int] = (BOX_BYTES,),
    in_flight: Sequence[int] = (IN_FLIGHT,),
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of one combination after another: memcpy, pack, unpack, by turns.

    Parameters
    ----------
    cases : sequence of Case
        With one size of cache; `concurrency` 1.
    threads : sequence of int
        Threads that copy; 0 is the caller's own.
    rounds : int
        Of each; the first, which is verified, is not counted.
    device : {"cpu", "cuda"}
        Where caches and slots are. On a GPU memcpy is the driver's copy within the device.
    boxes : sequence of int
        Bytes that are copied by one job, at most; one block at least.
    in_flight : sequence of int
        Jobs at a time.

    Raises
    ------
    BenchError
        What was unpacked is not what was packed.
    """
    source = allocate(device, cases[0].cache_bytes)
    target = allocate(device, cases[0].cache_bytes)
    with source.edit() as content:
        fill_source(content)
    with target.edit() as content:
        poison(content, None)
    combinations = list(itertools.product(cases, threads, boxes, in_flight))
    total = len(combinations) * (rounds + 1)
    done = 0
    for case, num_threads, box_bytes, num_jobs in combinations:
        one = _Case(case, num_threads, box_bytes, num_jobs, source, target)
        measured: dict[str, list[float]] = {"memcpy": [], "pack": [], "unpack": []}
        one.verify()
        for number in range(rounds + 1):
            progress(done, total, f"{case.label}, {num_threads} threads")
            done += 1
            for arm, seconds in one.round(number).items():
                if number:
                    measured[arm].append(case.total_bytes / seconds / 1e9)
        shape = {
            "threads": num_threads,
            "device": device,
            "box_bytes": box_bytes,
            "in_flight": num_jobs,
        }
        yield _rows(case, shape, measured)


class _Case:
    """The packers of one geometry over the two caches."""

    def __init__(
        self, case: Case, threads: int, box_bytes: int, in_flight: int, source: Memory, target: Memory
    ) -> None:
        self._case = case
        self._box_bytes = max(box_bytes, case.block_bytes)
        self._in_flight = in_flight
        self._source, self._target = source, target
        config = Config.from_env(pack_threads=threads).to_core()
        self._packer = _core.BenchPacker(make_cache(case, source).to_core(), config)
        self._unpacker = _core.BenchPacker(make_cache(case, target).to_core(), config)
        self._ring = allocate(source.kind, max(IN_FLIGHT, in_flight) * self._box_bytes)
        with self._ring.edit() as content:
            content[:] = 0

    def verify(self) -> None:
        case = self._case
        batches = make_batches(case, 0, 0, 1)[:1]
        (transfer,) = batches[0].transfers
        dense = allocate(self._source.kind, case.total_bytes)
        spans = block_spans(case, batches)
        with self._target.edit() as content:
            poison(content, spans)
        self._packer.run(False, self._parts(transfer.sources, dense), self._in_flight)
        self._unpacker.run(True, self._parts(transfer.targets, dense), self._in_flight)
        with self._target.edit() as content:
            problem = compare(content, spans, everywhere=False)
        if problem:
            raise BenchError(f"pack and unpack moved wrong bytes: {problem}")

    def round(self, number: int) -> dict[str, float]:
        """Return the seconds of each arm; all three move different parts of the caches."""
        case = self._case
        (transfer,) = make_batches(case, number, 0, 1)[0].transfers
        pack = self._parts(transfer.sources, self._ring)
        unpack = self._parts(transfer.targets, self._ring)
        begin = (number * case.total_bytes) % max(1, case.cache_bytes - case.total_bytes + 1)
        return {
            "memcpy": self._memcpy(begin),
            "pack": max(1, self._packer.run(False, pack, self._in_flight)) / 1e6,
            "unpack": max(1, self._unpacker.run(True, unpack, self._in_flight)) / 1e6,
        }

    def _memcpy(self, begin: int) -> float:
        """Copy as much, contiguous: on the host into the ring, slot by slot; on a GPU at once."""
        if self._source.kind == "cuda":
            started = time.monotonic_ns()
            self._target.copy(begin, self._source, begin, self._case.total_bytes)
            return (time.monotonic_ns() - started) / 1e9
        at, left, slot = begin, self._case.total_bytes, 0
        started = time.monotonic_ns()
        while left > 0:
            part = min(left, self._box_bytes)
            self._ring.copy(slot % IN_FLIGHT * self._box_bytes, self._source, at, part)
            at, left, slot = at + part, left - part, slot + 1
        return (time.monotonic_ns() - started) / 1e9

    def _parts(self, ids: Any, dense: Memory) -> list[tuple[int, int, list[int], int]]:
        """Cut a transfer into boxes that fit: some positions of one layer, or all of several."""
        case = self._case
        positions = max(1, min(len(ids), self._box_bytes // case.block_bytes))
        planes = max(1, self._box_bytes // (len(ids) * case.block_bytes)) if positions == len(ids) else 1
        parts, at = [], 0
        for plane in range(0, case.num_layers, planes):
            last = min(case.num_layers, plane + planes)
            for first in range(0, len(ids), positions):
                some = ids[first : first + positions].tolist()
                size = (last - plane) * len(some) * case.block_bytes
                if at + size > len(dense):
                    at = 0
                parts.append((plane, last, some, dense.address + at))
                at += size
        return parts


def _rows(case: Case, shape: dict[str, Any], measured: dict[str, list[float]]) -> list[dict[str, Any]]:
    copy = statistics.median(measured["memcpy"])
    return [
        {
            "kind": "pack",
            "arm": arm,
            "block_bytes": case.block_bytes,
            "run_blocks": case.run_blocks,
            "num_layers": case.num_layers,
            "total_bytes": case.total_bytes,
            **shape,
            "gb_per_s": round(statistics.median(rates), 4),
            "gb_per_s_min": round(min(rates), 4),
            "gb_per_s_max": round(max(rates), 4),
            "share_of_memcpy": round(statistics.median(rates) / copy, 4),
            "rounds": len(rates),
        }
        for arm, rates in measured.items()
    ]

"""Block tables, the bytes that a cache holds, and the check of what arrived. All off the clock."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpush.bench.cases import Case

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
POISON = 0x5A
_CHECK_BYTES = 1 << 20
_TORCH_ALIGNMENT = 64


def aligned_empty(num_bytes: int) -> Any:
    """Return uint8 [num_bytes] at a multiple of 64 bytes, as torch allocates; numpy's own is at 16."""
    memory: Any = np.empty(num_bytes + _TORCH_ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _TORCH_ALIGNMENT
    return memory[start : start + num_bytes]


@dataclass(frozen=True)
class Transfer:
    """One transfer: P's block ids and D's, int32, position by position, the same in every layer."""

    key: str
    sources: Any
    targets: Any


@dataclass(frozen=True)
class Batch:
    """Transfers that are submitted at once; `number` tells the batches of a run apart."""

    number: int
    transfers: list[Transfer]


def make_batches(case: Case, round_number: int, slot: int, num_slots: int) -> list[Batch]:
    """Return the batches of one round of variant `slot` of `num_slots`: the same in both processes.

    Rounds, batches and variants walk through the cache in turn, so that none finds the blocks that the one
    before it has warmed, as far as the cache is large enough for that.
    """
    first = (round_number * num_slots + slot) * case.num_batches
    return [_batch(case, first + i) for i in range(case.num_batches)]


def _batch(case: Case, number: int) -> Batch:
    wanted = case.num_positions * case.concurrency
    place = number % case.num_tables
    sources = _ids(case, seed=1)[place * wanted : (place + 1) * wanted]
    # Another order on D: the table that P's blocks meet changes too.
    targets = _ids(case, seed=2)[place * wanted : (place + 1) * wanted]
    per = case.num_positions
    return Batch(
        number,
        [
            Transfer(f"t{number}.{i}", sources[i * per : (i + 1) * per], targets[i * per : (i + 1) * per])
            for i in range(case.concurrency)
        ],
    )


_kept: dict[tuple[int, int, int, int], Any] = {}


def _ids(case: Case, seed: int) -> Any:
    """Return all blocks in an order of runs: run i of P's order meets run i of D's."""
    blocks, run = case.num_blocks, case.run_blocks
    key = (blocks, run, case.num_positions, seed)
    if key not in _kept:
        if len(_kept) > 8:
            _kept.clear()
        if run == 0:
            run = case.num_positions
        starts = np.random.default_rng(seed).permutation(blocks // run) * run
        ids = (starts[:, None] + np.arange(run)).ravel()
        rest = np.arange(len(ids), blocks)
        _kept[key] = np.concatenate([ids, rest]).astype(np.int32)
    return _kept[key]


@dataclass(frozen=True)
class Spans:
    """`sources` and `targets`: byte offsets of pieces of `length` bytes, in P's and D's cache."""

    sources: Any
    targets: Any
    length: int


def block_spans(case: Case, batches: Sequence[Batch]) -> Spans:
    """Return every block of every layer."""
    layers: Any = np.arange(case.num_layers, dtype=np.int64)[:, None] * case.num_blocks

    def offsets(side: str) -> Any:
        ids = np.concatenate([getattr(t, side) for b in batches for t in b.transfers])
        return ((layers + ids) * case.block_bytes).ravel()

    return Spans(offsets("sources"), offsets("targets"), case.block_bytes)


def piece(case: Case, batch: Batch, index: int, side: str) -> int:
    """Return the number of the piece of `total_bytes` that transfer `index` takes as one descriptor."""
    pieces = case.cache_bytes // case.total_bytes
    shift = 0 if side == "sources" else pieces // 2
    return (batch.number * case.concurrency + index + shift) % pieces


def piece_spans(case: Case, batches: Sequence[Batch]) -> Spans:
    """Return the whole pieces of :func:`piece`."""

    def offsets(side: str) -> Any:
        return np.array([piece(case, b, i, side) for b in batches for i in range(case.concurrency)])

    return Spans(
        offsets("sources") * case.total_bytes, offsets("targets") * case.total_bytes, case.total_bytes
    )


def fill_source(cache: Any) -> None:
    """Fill a cache, shape [bytes], with content that tells every eight bytes apart."""
    for begin, part in _parts(cache.view(np.uint64)):
        part[:] = _words(np.arange(begin, begin + len(part), dtype=np.uint64))


def poison(cache: Any, spans: Spans | None) -> None:
    """Fill these spans of a cache, None for all of it, with what no source has."""
    if spans is None:
        cache[:] = POISON
        return
    for at in spans.targets:
        cache[at : at + spans.length] = POISON


def compare(cache: Any, spans: Spans, everywhere: bool) -> str:
    """Return "" if D's cache holds the source's bytes in every span, else what is wrong.

    `everywhere`: and poison in all other places.
    """
    step = max(1, _CHECK_BYTES // spans.length)
    words = spans.length // 8
    for i in range(0, len(spans.targets), step):
        got_at = spans.targets[i : i + step, None] // 8 + np.arange(words)
        sent_at = spans.sources[i : i + step, None] // 8 + np.arange(words)
        wrong = cache.view(np.uint64)[got_at] != _words(sent_at.astype(np.uint64))
        if wrong.any():
            bad = np.nonzero(wrong.any(axis=1))[0]
            at = int(spans.targets[i + bad[0]])
            return f"{len(bad)} of {len(wrong)} pieces differ; the first, of {spans.length} bytes, is at {at}"
    if not everywhere:
        return ""
    rest: Any = np.ones(len(cache) // spans.length, dtype=bool)
    rest[spans.targets // spans.length] = False
    pieces = cache[: len(rest) * spans.length].reshape(len(rest), spans.length)
    for i in range(0, len(rest), step):
        if (pieces[i : i + step][rest[i : i + step]] != POISON).any():
            return "bytes outside the transfers were changed"
    return ""


def _words(index: Any) -> Any:
    return index * _MULTIPLIER + _MULTIPLIER


def _parts(array: Any) -> Iterator[tuple[int, Any]]:
    step = _CHECK_BYTES // array.itemsize
    for begin in range(0, len(array), step):
        yield begin, array[begin : begin + step]

"""The arm ``memcpy``: one core copies the same number of bytes, piece by piece, at D's end."""

import ctypes
import time
from collections.abc import Sequence
from typing import Any

from kvpush.bench.arms import End
from kvpush.bench.cases import Case
from kvpush.bench.tables import Batch, Spans, aligned_empty, fill_source, piece, piece_spans


class MemcpyEnd(End):
    """D copies out of a second cache of its own; P does nothing."""

    def __init__(self, cache: Any, is_source: bool) -> None:
        self._target = cache
        self._source = cache if is_source else aligned_empty(cache.nbytes)
        if not is_source:
            fill_source(self._source)
        self._case: Case | None = None

    def begin(self, case: Case) -> bool:
        self._case = case
        return False

    def wait(self, batch: Batch) -> tuple[list[int], list[int]]:
        assert self._case is not None
        started, ended = [], []
        size = self._case.total_bytes
        for i in range(self._case.concurrency):
            to = self._target.ctypes.data + piece(self._case, batch, i, "targets") * size
            of = self._source.ctypes.data + piece(self._case, batch, i, "sources") * size
            started.append(time.monotonic_ns())
            ctypes.memmove(to, of, size)
            ended.append(time.monotonic_ns())
        return ended, started

    def spans(self, batches: Sequence[Batch]) -> Spans:
        assert self._case is not None
        return piece_spans(self._case, batches)

"""The arm ``memcpy``: one core copies the same number of bytes, piece by piece, at D's end."""

import time
from collections.abc import Sequence

from kvpush.bench.arms import End
from kvpush.bench.cases import Case
from kvpush.bench.memory import Memory, allocate
from kvpush.bench.tables import Batch, Spans, fill_source, piece, piece_spans


class MemcpyEnd(End):
    """D copies out of a second cache of its own; P does nothing."""

    def __init__(self, memory: Memory, is_source: bool) -> None:
        self._target = memory
        self._source = memory if is_source else allocate(memory.kind, len(memory))
        if not is_source:
            with self._source.edit() as content:
                fill_source(content)
        self._case: Case | None = None

    def begin(self, case: Case) -> bool:
        self._case = case
        return False

    def wait(self, batch: Batch) -> tuple[list[int], list[int]]:
        assert self._case is not None
        started, ended = [], []
        size = self._case.total_bytes
        for i in range(self._case.concurrency):
            to = piece(self._case, batch, i, "targets") * size
            of = piece(self._case, batch, i, "sources") * size
            started.append(time.monotonic_ns())
            self._target.copy(to, self._source, of, size)
            ended.append(time.monotonic_ns())
        return ended, started

    def spans(self, batches: Sequence[Batch]) -> Spans:
        assert self._case is not None
        return piece_spans(self._case, batches)

"""The arm ``fi-writedata``: what libfabric itself moves, without kvpush's transport.

The loop of a careful user, in C++ (csrc/transport/fabric/plain_writes.cpp): writes of one slot's size out of
one registered region into another, as many under way as a landing has slots; D counts their immediates. Both
sides look at their completion queues without a pause. Nothing is packed, opened or credited.
"""

import json
import time
from collections.abc import Sequence

from kvpush import _core
from kvpush.bench.arms import End
from kvpush.bench.cases import Case
from kvpush.bench.memory import Memory
from kvpush.bench.tables import Batch, Spans, piece, piece_spans
from kvpush.config import Config, fabric_libraries
from kvpush.errors import InvalidArgument

DEFAULT_SLOT_BYTES = 1 << 20  # as kvpush.Config says of slot_bytes=0


class WriteDataEnd(End):
    """One endpoint over `memory`, of the host."""

    def __init__(self, memory: Memory, is_source: bool, provider: str) -> None:
        if memory.device >= 0:
            raise InvalidArgument("arm fi-writedata: host memory only")
        config = Config.from_env()
        libraries = fabric_libraries(config.fabric_library)
        self._writes = _core.BenchWrites(memory.address, len(memory), libraries, provider)
        self._write_bytes = config.slot_bytes or DEFAULT_SLOT_BYTES
        self._window = config.num_slots
        self._case: Case | None = None
        self._is_connected = False
        self._batch: Batch | None = None

    def begin(self, case: Case) -> bool:
        self._case = case
        return not self._is_connected

    def offer(self) -> bytes:
        return self._description()

    def answer(self, offer: bytes) -> bytes:
        self._learn(offer)
        return self._description()

    def establish(self, answer: bytes) -> None:
        self._learn(answer)

    def _description(self) -> bytes:
        endpoint, base, key = self._writes.address()
        return json.dumps([endpoint.hex(), base, key]).encode()

    def _learn(self, description: bytes) -> None:
        endpoint, base, key = json.loads(description)
        self._writes.connect(bytes.fromhex(endpoint), base, key)
        self._is_connected = True

    def submit(self, batch: Batch) -> list[int]:
        self._batch = batch
        return [time.monotonic_ns()] * len(batch.transfers)

    def drain(self) -> None:
        """Write, from here on: libfabric moves data only while somebody looks."""
        assert self._case is not None
        assert self._batch is not None
        size = self._case.total_bytes
        pieces = [
            tuple(piece(self._case, self._batch, i, side) * size for side in ("sources", "targets"))
            for i in range(self._case.concurrency)
        ]
        self._writes.write([(of, to, size) for of, to in pieces], self._write_bytes, self._window)

    def wait(self, batch: Batch) -> tuple[list[int], list[int]]:
        return self._writes.wait([self.network_ops()] * len(batch.transfers)), []

    def spans(self, batches: Sequence[Batch]) -> Spans:
        assert self._case is not None
        return piece_spans(self._case, batches)

    def network_ops(self) -> int:
        assert self._case is not None
        return -(-self._case.total_bytes // self._write_bytes)

"""The arm ``kvpush``: two engines, the caches' planes layer by layer as vLLM allocates them."""

import time
from collections.abc import Sequence
from typing import Any

import kvpush
from kvpush.bench.arms import End
from kvpush.bench.cases import VLLM_BLOCK_TOKENS, Case
from kvpush.bench.memory import Memory
from kvpush.bench.tables import Batch, Spans, block_spans
from kvpush.errors import TransportError

_DIGEST = b"bench"
# Between two rounds both processes are stopped: that silence is no loss.
_STOPPED_S = 600.0
_WAIT_S = 60.0


class KvpushEnd(End):
    """One engine over `memory`; `fabric_provider` is a field of :class:`kvpush.Config`."""

    def __init__(self, memory: Memory, is_source: bool, transport: str, fabric_provider: str = "") -> None:
        self._memory = memory
        self._transport = transport
        self._fabric_provider = fabric_provider
        self._case: Case | None = None
        self._engine: kvpush.Engine | None = None
        self._peer = ""
        self._open: dict[str, Any] = {}
        self._ended: dict[str, int] = {}
        self._boxes = 0

    def begin(self, case: Case) -> bool:
        before, self._case = self._case, case
        if before is not None and (before.block_bytes, before.num_layers) == (
            case.block_bytes,
            case.num_layers,
        ):
            return False
        if self._engine is not None:
            self._engine.close()
        config = kvpush.Config.from_env(
            transport=self._transport,
            peer_timeout_s=_STOPPED_S,
            handshake_timeout_s=_STOPPED_S,
            fabric_provider=self._fabric_provider or None,
        )
        self._engine = kvpush.Engine(make_cache(case, self._memory), config)
        return True

    def offer(self) -> bytes:
        return self._live.offer()

    def answer(self, offer: bytes) -> bytes:
        return self._live.answer(offer)

    def establish(self, answer: bytes) -> None:
        self._peer = self._live.establish(answer)

    def open(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            for one in batch.transfers:
                self._open[one.key] = self._live.receive(
                    self._peer, one.key, digest=_DIGEST, blocks=[one.targets], first=[0]
                )

    def submit(self, batch: Batch) -> list[int]:
        started = []
        for one in batch.transfers:
            started.append(time.monotonic_ns())
            push = self._live.push(one.key, _DIGEST)
            push.advance([one.sources])
            push.finish()
            self._open[one.key] = push
        return started

    def drain(self) -> None:
        while self._open:
            self._poll()
        self._ended.clear()

    def wait(self, batch: Batch) -> tuple[list[int], list[int]]:
        keys = [one.key for one in batch.transfers]
        while not all(key in self._ended for key in keys):
            self._poll()
        return [self._ended.pop(key) for key in keys], []

    def _poll(self) -> None:
        events = self._live.poll(timeout=_WAIT_S)
        now = time.monotonic_ns()
        if not events:
            raise TransportError(f"kvpush over {self._transport}: nothing happened for {_WAIT_S:.0f} s")
        for event in events:
            if event.kind not in ("sent", "received"):
                raise TransportError(
                    f"kvpush over {self._transport}: {event.kind} {event.status} {event.detail}"
                )
            self._ended[event.key] = now
            self._boxes = event.boxes
            self._open.pop(event.key)

    def spans(self, batches: Sequence[Batch]) -> Spans:
        assert self._case is not None
        return block_spans(self._case, batches)

    def network_ops(self) -> int:
        return self._boxes

    @property
    def _live(self) -> kvpush.Engine:
        assert self._engine is not None
        return self._engine


def make_cache(case: Case, memory: Memory) -> kvpush.Cache:
    """Describe memory as the planes of `case`, layer after layer."""
    layer = case.num_blocks * case.block_bytes
    shape = (case.num_blocks, 1, VLLM_BLOCK_TOKENS, case.block_bytes // VLLM_BLOCK_TOKENS)
    planes = [
        kvpush.Plane.from_array(memory.part(i * layer, shape), name=f"layer{i}")
        for i in range(case.num_layers)
    ]
    return kvpush.Cache([kvpush.Group(VLLM_BLOCK_TOKENS, planes)], fingerprint={"model": "bench"})

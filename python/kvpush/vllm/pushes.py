"""P's half of the worker: one entry per pushed request, from its key to its one report."""

import time
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger

from kvpush.vllm.layout import CacheSpec
from kvpush.vllm.metadata import Advance, Close, NewPush
from kvpush.vllm.metrics import KVPushStats
from kvpush.vllm.trace import Trace, event_fields

logger = init_logger("vllm." + __name__)


@dataclass
class Push:
    """One request. ``next``: per group, the position where the next advance continues."""

    req_id: str
    key: str
    handle: Any
    next: list[int]
    opened_at: float
    finished_at: float | None = None
    finished_mono: float | None = None
    done: bool = False
    closed: bool = False
    delayed: bool = False


def error_code(error: BaseException) -> str:
    """Name an exception for the failure counters: its class in snake case."""
    name = type(error).__name__
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class Pushes:
    """All pushes of one worker. Not thread-safe; no method raises for a request's sake."""

    def __init__(self, engine: Any, spec: CacheSpec, stats: KVPushStats, trace: Trace) -> None:
        self._engine = engine
        self._spec = spec
        self._stats = stats
        self._trace = trace
        self._by_id: dict[str, Push] = {}
        self._by_handle: dict[int, Push] = {}
        self._sent: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_handle)

    def open(self, new: NewPush) -> None:
        """Queue ``push(key)``; a request with an error only leaves a tombstone at its key."""
        push = Push(new.req_id, new.key, None, [0] * len(self._spec.groups), time.time())
        try:
            handle = self._engine.push(new.key, digest=new.digest)
        except Exception as error:
            self._failed(push, error_code(error), str(error))
            handle = None
        if new.error is not None:
            if handle is not None:
                handle.abort(new.error)
            return
        push.handle = handle
        push.done = handle is None
        self._by_id[new.req_id] = push
        if handle is not None:
            self._by_handle[handle.handle] = push

    def retract(self, req_id: str) -> None:
        """Fence: when this returns, no pack reads the request's blocks and none will start."""
        push = self._by_id.get(req_id)
        if push is None or push.done:
            return
        try:
            push.next = [int(position) for position in push.handle.retract()]
            push.finished_at = push.finished_mono = None
        except Exception as error:
            self._give_up(push, error)

    def advance(self, advances: list[Advance], after: int | None) -> None:
        """Hand out what this step's forward completed; ``after`` is a CUDA event handle or None."""
        for order in advances:
            push = self._by_id.get(order.req_id)
            if push is None or push.done:
                continue
            try:
                self._advance_one(push, order, after)
            except Exception as error:
                self._give_up(push, error)

    def _advance_one(self, push: Push, order: Advance, after: int | None) -> None:
        parts = []
        for g, (first, ids) in enumerate(zip(order.first, order.blocks, strict=True)):
            skip = push.next[g] - first
            if skip < 0:
                raise ValueError(f"group {g}: blocks from position {first} on, but {push.next[g]} is next")
            parts.append(ids[skip:])
            push.next[g] += len(parts[-1])
        push.handle.advance(parts, after=after)
        if order.finish:
            push.handle.finish()
            push.finished_at, push.finished_mono = time.time(), time.monotonic()

    def close(self, order: Close) -> bool:
        """Take note that vLLM is through with a request; False if it is not known."""
        push = self._by_id.pop(order.req_id, None)
        if push is None:
            return False
        push.closed, push.delayed = True, order.delayed
        if push.done:
            if push.delayed:
                self._sent.add(push.req_id)
        elif order.abort is not None:
            push.handle.abort(order.abort)
        return True

    def close_unknown(self, order: Close) -> None:
        """Report a delayed request that never had a push, so that its blocks come back."""
        if order.delayed:
            logger.error("kvpush: request %s waits for a push that does not exist", order.req_id)
            self._sent.add(order.req_id)

    def on_event(self, event: Any) -> None:
        """Take the engine's terminal event of a push."""
        push = self._by_handle.pop(event.handle, None)
        if push is None:
            return
        push.done = True
        if event.kind == "sent":
            self._stats.count("sent")
            self._stats.count("boxes", event.boxes)
            if push.finished_mono is not None:
                self._stats.observe("push_seconds", time.monotonic() - push.finished_mono)
        else:
            self._failed(push, event.status, event.detail)
        self._stats.count("bytes_sent", event.bytes)
        for stage, us in event.timings.items():
            self._stats.label("stage_us", stage.removesuffix("_us"), us)
        self._trace.write(
            side="push",
            request_id=push.req_id,
            per_block_descriptors=self._units(push, event.bytes),
            opened_at=push.opened_at,
            finished_at=push.finished_at,
            ended_at=time.time(),
            **event_fields(event),
        )
        if push.closed and push.delayed:
            self._sent.add(push.req_id)

    def _units(self, push: Push, moved_bytes: int) -> int:
        groups = self._spec.groups
        if len(groups) == 1:
            return moved_bytes * len(groups[0].planes) // groups[0].unit_bytes
        return sum(count * len(group.planes) for count, group in zip(push.next, groups, strict=True))

    def take_sent(self) -> set[str]:
        """Ids to report in finished_sending, each once, only such as vLLM waits for."""
        sent, self._sent = self._sent, set()
        return sent

    def fail_all(self, code: str, detail: str) -> None:
        """End every open push: the engine is gone."""
        for push in list(self._by_handle.values()):
            push.done = True
            self._failed(push, code, detail)
            if push.closed and push.delayed:
                self._sent.add(push.req_id)
        self._by_handle.clear()

    def _give_up(self, push: Push, error: Exception) -> None:
        logger.error("kvpush: push of request %s (key %s): %s", push.req_id, push.key, error)
        self._stats.label("failures", error_code(error))
        push.handle.abort(str(error))

    def _failed(self, push: Push, code: str, detail: str) -> None:
        self._stats.label("failures", code or "unknown")
        logger.warning(
            "kvpush: push of request %s (key %s) failed: %s %s", push.req_id, push.key, code, detail
        )

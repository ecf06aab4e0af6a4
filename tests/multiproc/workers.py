"""P and D as processes of their own: each serves one engine, a call at a time, over a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

import kvpush

DEADLINE_S = 20.0
PEER_TIMEOUT_S = 1.0
CONFIG = {"peer_timeout_s": PEER_TIMEOUT_S, "slot_bytes": 4096, "num_slots": 4, "close_timeout_s": 1.0}
TRANSPORTS = ["shm", pytest.param("nixl", marks=pytest.mark.nixl)]


class _Served:
    """What a worker's process answers; sources hold a block's number + 1, targets hold 0."""

    def __init__(self, transport: str, is_source: bool) -> None:
        import numpy as np
        from engines import cache

        self.array = np.zeros((64, 2, 4, 8), dtype=np.float32)
        if is_source:
            self.array += np.arange(1, 65, dtype=np.float32)[:, None, None, None]
        self.engine = kvpush.Engine(cache([[self.array]]), kvpush.Config(transport=transport, **CONFIG))
        self.handles: list[Any] = []
        self.ended: dict[str, tuple[str, str]] = {}

    def call(self, name: str, *args: Any) -> Any:
        return getattr(self.engine, name)(*args)

    def push(self, key: str, blocks: list[int], finish: bool = True) -> None:
        push = self.engine.push(key, digest=b"d")
        self.handles.append(push)
        push.advance([blocks])
        if finish:
            push.finish()

    def receive(self, peer: str, key: str, blocks: list[int]) -> None:
        self.handles.append(self.engine.receive(peer, key, digest=b"d", blocks=[blocks]))

    def event(self, key: str, timeout: float) -> Any:
        """The terminal event of this key, as (kind, status); None at the deadline."""
        until = time.monotonic() + timeout
        while key not in self.ended and time.monotonic() < until:
            for event in self.engine.poll(timeout=0.05):
                if event.kind != "lost":
                    assert event.key not in self.ended, f"a second end of {event.key}"
                    self.ended[event.key] = (event.kind, event.status)
        return self.ended.pop(key, None)

    def blocks(self, blocks: list[int]) -> list[float]:
        part = self.array[blocks]
        assert (part == part[:, :1, :1, :1]).all(), "a block holds parts of several"
        return [float(value) for value in part[:, 0, 0, 0]]


def _serve(pipe: Connection, transport: str, is_source: bool) -> None:
    served = _Served(transport, is_source)
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            name, args = pipe.recv()
            try:
                pipe.send((getattr(served, name)(*args), None))
            except Exception as error:
                pipe.send((None, repr(error)))
    served.engine.close()


class Worker:
    """One process. Every answer has a deadline."""

    def __init__(self, transport: str, is_source: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, transport, is_source), daemon=True)
        self.process.start()
        theirs.close()
        self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(DEADLINE_S), "a worker did not answer in time"
        return self._pipe.recv()

    def start(self, name: str, *args: Any) -> None:
        self._pipe.send((name, args))

    def result(self) -> Any:
        value, error = self._answer()
        assert error is None, error
        return value

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.start(name, *args)
            return self.result()

        return call

    def stats(self) -> dict[str, Any]:
        return dict(self.call("stats"))

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)
        assert self.process.exitcode == -signal.SIGKILL


@contextlib.contextmanager
def workers(transport: str, num_p: int = 1, num_d: int = 1) -> Iterator[list[Worker]]:
    """The P workers, then the D workers."""
    if transport == "nixl" and (why := kvpush.transports()["nixl"]):
        pytest.skip(why)
    made: list[Worker] = []
    try:
        for i in range(num_p + num_d):
            made.append(Worker(transport, is_source=i < num_p))
        yield made
    finally:
        for worker in made:
            worker.process.kill()
            worker.process.join(DEADLINE_S)


def connect(p: Worker, d: Worker) -> str:
    return str(d.call("establish", p.call("answer", d.call("offer"))))


def transfer(p: Worker, d: Worker, peer: str, key: str, source: list[int], target: list[int]) -> None:
    """One whole transfer, checked on both sides."""
    d.receive(peer, key, target)
    p.push(key, source)
    assert d.event(key, DEADLINE_S / 2) == ("received", "ok")
    assert p.event(key, DEADLINE_S / 2) == ("sent", "ok")
    assert d.blocks(target) == [block + 1 for block in source]


def until(condition: Any, what: str) -> None:
    """Waits for a condition that has no event to wait for."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.02)

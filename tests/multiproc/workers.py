"""P and D as processes of their own: each serves one engine, a call at a time, over a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker, spawn
from multiprocessing.connection import Connection
from typing import Any

import pytest
from engines import cache, settings, why_not

import kvpush

DEADLINE_S = 20.0
PEER_TIMEOUT_S = 0.8
# Silence is timed from the last message heard, and judged once per ping interval; the rest is the machine.
BOUND_S = 3 * PEER_TIMEOUT_S + 2
SLOT_BYTES, NUM_SLOTS = 4096, 4
BLOCK_BYTES = 2 * 4 * 8 * 4
CONFIG = {
    "peer_timeout_s": PEER_TIMEOUT_S,
    "slot_bytes": SLOT_BYTES,
    "num_slots": NUM_SLOTS,
    "close_timeout_s": 1.0,
}


class _Served:
    """What a worker's process answers; sources hold a block's number + 1, targets hold 0."""

    def __init__(self, transport: str, is_source: bool, content: int, config: dict[str, Any]) -> None:
        import numpy as np

        self.array = np.zeros((64, 2, 4, content), dtype=np.float32)
        if is_source:
            self.array += np.arange(1, 65, dtype=np.float32)[:, None, None, None]
        self.engine = kvpush.Engine(cache([[self.array]]), kvpush.Config(**settings(transport), **config))
        self.pushes: dict[str, Any] = {}
        self.claims: dict[str, Any] = {}
        self.receives: dict[str, Any] = {}
        self.ended: dict[str, tuple[str, str]] = {}
        self.over: set[str] = set()
        self.lost: set[str] = set()

    def call(self, name: str, *args: Any) -> Any:
        return getattr(self.engine, name)(*args)

    def push(self, key: str, blocks: list[int], finish: bool = True) -> None:
        self.pushes[key] = self.engine.push(key, digest=b"d")
        self.advance(key, blocks, finish)

    def advance(self, key: str, blocks: list[int], finish: bool = True) -> None:
        self.pushes[key].advance([blocks])
        if finish:
            self.pushes[key].finish()

    def push_each(self, keys: list[str], blocks: Sequence[int], finish: bool = True) -> None:
        for key, block in zip(keys, blocks, strict=True):
            self.push(key, [block], finish)

    def expect(self, peer: str, key: str) -> None:
        self.claims[key] = self.engine.expect(peer, key)

    def receive(self, peer: str, key: str, blocks: list[int]) -> None:
        if key in self.claims:
            self.receives[key] = self.claims.pop(key).receive(digest=b"d", blocks=[blocks])
        else:
            self.receives[key] = self.engine.receive(peer, key, digest=b"d", blocks=[blocks])

    def receive_each(self, peer: str, keys: list[str], blocks: Sequence[int]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            self.receive(peer, key, [block])

    def cancel(self, key: str) -> None:
        self.receives[key].cancel()

    def event(self, key: str, timeout: float) -> Any:
        """The terminal event of this key, as (kind, status); None at the deadline."""
        self._poll_until(lambda: key in self.ended, timeout)
        return self.ended.pop(key, None)

    def is_lost(self, peer: str, timeout: float) -> bool:
        """Whether the session has ended, all its transfers before it."""
        self._poll_until(lambda: peer in self.lost, timeout)
        return peer in self.lost

    def _poll_until(self, condition: Callable[[], bool], timeout: float) -> None:
        until = time.monotonic() + timeout
        while not condition() and time.monotonic() < until:
            for event in self.engine.poll(timeout=0.05):
                if event.kind == "lost":
                    self.lost.add(event.peer)
                else:
                    assert event.key not in self.over, f"a second end of {event.key}"
                    self.over.add(event.key)
                    self.ended[event.key] = (event.kind, event.status)

    def blocks(self, blocks: list[int]) -> list[float]:
        part = self.array[blocks]
        assert (part == part[:, :1, :1, :1]).all(), "a block holds parts of several"
        return [float(value) for value in part[:, 0, 0, 0]]

    def scribble(self, blocks: list[int], value: float) -> None:
        self.array[blocks] = value


def _serve(pipe: Connection, *what: Any) -> None:
    served = _Served(*what)
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            name, args = pipe.recv()
            try:
                pipe.send((getattr(served, name)(*args), None))
            except Exception as error:
                pipe.send((None, repr(error)))
    served.engine.close()


@contextlib.contextmanager
def _started_by(program: str) -> Iterator[None]:
    """Processes that are spawned meanwhile are started by this program instead of Python."""
    resource_tracker.ensure_running()  # of this process, which outlives them
    before = spawn.get_executable()
    multiprocessing.set_executable(program)
    yield
    multiprocessing.set_executable(before)


class Worker:
    """One process. It starts while the test goes on; every answer has a deadline.

    `content` is that of the cache, [64 blocks, 2, 4, content] of float32.
    """

    def __init__(
        self, transport: str, is_source: bool, content: int = 8, program: str = sys.executable, **config: Any
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.config = {**CONFIG, **config}
        what = (theirs, transport, is_source, content, self.config)
        self.process = context.Process(target=_serve, args=what, daemon=True)
        with _started_by(program):
            self.process.start()
        theirs.close()
        self.is_source = is_source
        self._ready = False

    def _answer(self) -> Any:
        assert self._pipe.poll(DEADLINE_S), "a worker did not answer in time"
        return self._pipe.recv()

    def start(self, name: str, *args: Any) -> None:
        if not self._ready:
            self._answer()
            self._ready = True
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
        if number == signal.SIGSTOP:  # kill() returns before the last thread has stopped
            _, status = os.waitpid(self.process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), status

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)
        assert self.process.exitcode == -signal.SIGKILL


class Pool:
    """Workers that outlive a test: what one test leaves behind, the next one sees in the statistics."""

    def __init__(self, make: Callable[[str, bool], Worker] = Worker) -> None:
        self._make = make
        self._idle: dict[tuple[str, bool], list[Worker]] = {}

    @contextlib.contextmanager
    def take(self, transport: str, *roles: str) -> Iterator[list[Worker]]:
        """A worker for each role, "p" or "d". Those that live come back, unless the test fails."""
        if why := why_not(transport):
            pytest.skip(why)
        taken: list[tuple[list[Worker], Worker]] = []
        for role in roles:
            idle = self._idle.setdefault((transport, role == "p"), [])
            taken.append((idle, idle.pop() if idle else self._make(transport, role == "p")))
        try:
            yield [worker for _, worker in taken]
        except BaseException:
            for _, worker in taken:
                end(worker)
            raise
        for idle, worker in taken:
            if worker.process.is_alive():
                idle.append(worker)

    def close(self) -> None:
        for idle in self._idle.values():
            for worker in idle:
                end(worker)


def end(worker: Worker) -> None:
    worker.process.kill()
    worker.process.join(DEADLINE_S)


def connect(p: Worker, d: Worker) -> str:
    return str(d.call("establish", p.call("answer", d.call("offer"))))


def transfer(p: Worker, d: Worker, peer: str, key: str, source: list[int], target: list[int]) -> None:
    """One whole transfer, checked on both sides."""
    d.receive(peer, key, target)
    p.push(key, source)
    received = d.event(key, DEADLINE_S / 2)
    assert received == ("received", "ok"), f"{key} at D: {received}"
    assert p.event(key, DEADLINE_S / 2) == ("sent", "ok")
    assert d.blocks(target) == [block + 1 for block in source]


def until(condition: Callable[[], bool], what: object) -> None:
    """Waits for a condition that has no event to wait for."""
    end_at = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_at, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.02)


def nothing_is_left(worker: Worker, num_sessions: int = 0) -> None:
    """Waits until only these sessions are open, with nothing under way on them and no memory set aside."""
    names = ("open_pushes", "open_claims", "open_receives", "leases_in_use", "quarantined_bytes")
    slots = num_sessions * worker.config["num_slots"]
    expected = {
        **dict.fromkeys(names, 0),
        "sessions": num_sessions,
        "credits": slots if worker.is_source else 0,
        "landing_bytes": 0 if worker.is_source else slots * worker.config["slot_bytes"],
    }
    left: dict[str, Any] = {}

    def gone() -> bool:
        stats = worker.stats()
        left.update({name: stats[name] for name in expected})
        return left == expected

    until(gone, left)

"""Two processes per arm, P and D, driven round by round over pipes; stopped while another arm's turn is on.

Stopped, because the threads of an idle NIXL agent take a quarter of a core, which would count against whoever
is being measured.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from kvpush.bench.arms import End, PairSpec, Variant
from kvpush.bench.cases import Case
from kvpush.bench.remote import RemoteProcess
from kvpush.errors import KvpushError

if TYPE_CHECKING:
    from kvpush.bench.memory import Memory

_DEADLINE_S = 180.0
_SETTLE_S = 0.005
_PR_SET_PDEATHSIG = 1


class BenchError(KvpushError):
    """An arm failed, or moved wrong bytes; the message names it."""


@dataclass(frozen=True)
class Round:
    """One round of one variant. Times in seconds; `latencies_s` has every transfer."""

    gb_per_s: float
    latencies_s: list[float]
    cpu_p_s: float
    cpu_d_s: float
    num_bytes: int
    network_ops: int


class Pair:
    """The two processes of one :class:`PairSpec`. A context manager: leaving it ends them.

    With `host`, the address of a ``kvpush bench peer``, D runs there. Its clock is another: a transfer then
    ends when P has been told that D has seen it complete, on the way of the commands.
    """

    def __init__(
        self,
        spec: PairSpec,
        cache_bytes: int,
        env: Mapping[str, str | None],
        device: str = "cpu",
        host: tuple[str, int] | None = None,
    ) -> None:
        self.spec = spec
        self._case: Case | None = None
        self._is_remote = host is not None
        self._context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        settings = (cache_bytes, device, dict(env))
        if host is not None:
            remote = RemoteProcess(host, (spec.factory, False, *settings))
            self._start(remote.peer, True, settings)
            self._pipes.append(remote.pipe)
            self._processes.append(remote)
        else:
            theirs_p, theirs_d = self._context.Pipe()
            self._start(theirs_p, True, settings)
            self._start(theirs_d, False, settings)
        self._both()
        self.stop()

    def _start(self, peer: Connection, is_source: bool, settings: tuple[Any, ...]) -> None:
        ours, pipe = self._context.Pipe()
        process = self._context.Process(
            target=serve,
            args=(pipe, peer, self.spec.factory, is_source, *settings),
            daemon=True,
            name=f"bench {self.spec.name}",
        )
        process.start()
        pipe.close()
        peer.close()
        self._pipes.append(ours)
        self._processes.append(process)

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10.0)

    def stop(self) -> None:
        """Take both processes off the processors."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo :meth:`stop`."""
        self._signal(signal.SIGCONT)

    def begin(self, case: Case) -> None:
        """Make ready for the rounds of `case`."""
        self.resume()
        self._case = case
        if self._both("begin", case)[0]:
            answer = self._p("answer", self._d("offer"))
            self._d("establish", answer)
        self.stop()

    def round(self, variant: Variant, number: int, slot: int, num_slots: int, verify: str = "") -> Round:
        """Run one round.

        With `verify`, "all" or "spans": poison D's cache, or what of it must be written, and compare that
        afterwards.

        Raises
        ------
        BenchError
            The arm failed, or what arrived is not what was sent.
        """
        assert self._case is not None
        self.resume()
        try:
            args = (variant.mode, number, slot, num_slots, verify)
            self._send(0, "submit", args)
            self._send(1, "open", args)
            self._receive()  # both are ready
            time.sleep(_SETTLE_S)
            self._pipes[0].send(None)
            (p, d) = self._receive()
        finally:
            self.stop()
        if d["problem"]:
            raise BenchError(f"{variant.arm} over {variant.transport} moved wrong bytes: {d['problem']}")
        starts, all_ends = d["starts"] or p["starts"], d["ends"]
        if self._is_remote and not d["starts"]:
            all_ends = [[seen] * len(begun) for begun, seen in zip(starts, p["seen"], strict=True)]
        taken = [
            (min(begun), max(ended), [e - b for b, e in zip(begun, ended, strict=True)])
            for begun, ended in zip(starts, all_ends, strict=True)
        ]
        num_bytes = self._case.batch_bytes * self._case.num_batches
        return Round(
            gb_per_s=num_bytes / sum(end - begin for begin, end, _ in taken),
            latencies_s=[ns / 1e9 for _, _, each in taken for ns in each],
            cpu_p_s=p["cpu_s"],
            cpu_d_s=d["cpu_s"],
            num_bytes=num_bytes,
            network_ops=max(p["ops"], d["ops"]),
        )

    def _p(self, name: str, *args: Any) -> Any:
        self._send(0, name, args)
        return self._receive([0])[0]

    def _d(self, name: str, *args: Any) -> Any:
        self._send(1, name, args)
        return self._receive([1])[0]

    def _both(self, name: str = "", *args: Any) -> list[Any]:
        if name:
            self._send(0, name, args)
            self._send(1, name, args)
        return self._receive()

    def _send(self, side: int, name: str, args: tuple[Any, ...]) -> None:
        try:
            self._pipes[side].send((name, args))
        except OSError as error:
            raise BenchError(f"{self.spec.name}: {'PD'[side]} is gone: {error}") from None

    def _blame(self, side: int, error: str) -> None:
        """Raise the death of a process that another, or its pipe, has noticed."""
        if not error.startswith("EOFError"):
            return
        self._processes[side].join(5.0)
        code = self._processes[side].exitcode
        raise BenchError(f"{self.spec.name}: {'PD'[side]} died with code {code}") from None

    def _receive(self, sides: list[int] | None = None) -> list[Any]:
        """Return one answer of each side; the first failure of any ends it."""
        waiting = dict.fromkeys([0, 1] if sides is None else sides)
        answers: dict[int, Any] = {}
        until = time.monotonic() + _DEADLINE_S
        while len(answers) < len(waiting):
            open_pipes = [self._pipes[side] for side in waiting if side not in answers]
            ready = wait(open_pipes, max(0.0, until - time.monotonic()))
            if not ready:
                raise BenchError(f"{self.spec.name}: no answer within {_DEADLINE_S:.0f} s")
            for pipe in ready:
                side = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[side], error = self._pipes[side].recv()
                except (EOFError, OSError):
                    self._blame(side, "EOFError")
                if error:
                    self._blame(1 - side, error)
                    raise BenchError(f"{self.spec.name}, at {'PD'[side]}: {error}")
        return [answers[side] for side in waiting]

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if isinstance(process, RemoteProcess):
                process.signal(number)
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


# --- the processes


class _Worker:
    """P or D of one arm."""

    def __init__(self, pipe: Connection, peer: Connection, end: End, memory: "Memory") -> None:
        self._pipe, self._peer, self._end, self._memory = pipe, peer, end, memory
        self._case: Case | None = None

    def begin(self, case: Case) -> bool:
        self._case = case
        return self._end.begin(case)

    def offer(self) -> bytes:
        return self._end.offer()

    def answer(self, offer: bytes) -> bytes:
        return self._end.answer(offer)

    def establish(self, answer: bytes) -> None:
        self._end.establish(answer)

    def submit(self, mode: str, number: int, slot: int, num_slots: int, verify: str) -> dict[str, Any]:
        from kvpush.bench.tables import make_batches

        assert self._case is not None
        self._end.mode = mode
        batches = make_batches(self._case, number, slot, num_slots)
        self._pipe.send(("ready", ""))
        self._pipe.recv()
        starts, seen = [], []
        cpu = time.process_time()
        for batch in batches:
            if self._case.idle_ms:
                time.sleep(self._case.idle_ms / 1e3)
            starts.append(self._end.submit(batch))
            self._end.drain()
            self._peer.recv_bytes()  # D has it all
            seen.append(time.monotonic_ns())
        cpu = time.process_time() - cpu
        return {"starts": starts, "seen": seen, "cpu_s": cpu, "ops": self._end.network_ops()}

    def open(self, mode: str, number: int, slot: int, num_slots: int, verify: str) -> dict[str, Any]:
        from kvpush.bench.tables import compare, make_batches, poison

        assert self._case is not None
        self._end.mode = mode
        batches = make_batches(self._case, number, slot, num_slots)
        if verify:
            with self._memory.edit() as content:
                poison(content, None if verify == "all" else self._end.spans(batches))
        cpu = time.process_time()
        self._end.open(batches)
        self._pipe.send(("ready", ""))
        ends, starts = [], []
        for batch in batches:
            ended, began = self._end.wait(batch)
            self._peer.send_bytes(b".")
            ends.append(ended)
            starts += [began] if began else []
        cpu = time.process_time() - cpu
        problem = ""
        if verify:
            with self._memory.edit() as content:
                problem = compare(content, self._end.spans(batches), verify == "all")
        return {
            "ends": ends,
            "starts": starts,
            "cpu_s": cpu,
            "ops": self._end.network_ops(),
            "problem": problem,
        }


def serve(
    pipe: Connection,
    peer: Connection,
    factory: Any,
    is_source: bool,
    cache_bytes: int,
    device: str,
    env: dict[str, str | None],
) -> None:
    """Run one process until the pipe ends."""
    # Libraries may write to stdout, which is for results.
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    # Even if it is killed: a stopped process would not notice that its pipe has ended.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    from kvpush.bench.memory import allocate
    from kvpush.bench.tables import fill_source, poison

    try:
        memory = allocate(device, cache_bytes)
        with memory.edit() as content:
            fill_source(content) if is_source else poison(content, None)  # and every page is touched
        worker = _Worker(pipe, peer, factory(memory, is_source), memory)
        pipe.send((None, ""))
    except Exception as error:
        pipe.send((None, _text(error)))
        return
    with contextlib.suppress(EOFError, OSError):
        while True:
            name, args = pipe.recv()
            try:
                pipe.send((getattr(worker, name)(*args), ""))
            except Exception as error:
                pipe.send((None, _text(error)))


def _text(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"

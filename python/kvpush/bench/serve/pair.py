"""The driver's end of one arm: a prefill and a decode process, and one request through both."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpush.bench.serve.arms import HOST, Arm, Moved, moved
from kvpush.bench.serve.model import Shape

_STOP_S = 20.0


class ServeBenchError(RuntimeError):
    """An engine died, or an arm did not do what it is measured for; the message says which and what."""


@dataclass(frozen=True)
class Sample:
    """One request. Times in seconds of ``CLOCK_MONOTONIC``.

    ``answered``: P's answer; ``began``: D's step that gave its first token; ``times``: D's tokens.
    ``tokens`` are D's, ``first`` is P's.
    """

    sent: float
    answered: float
    began: float
    times: list[float]
    tokens: list[int]
    first: list[int]

    @property
    def hand_over(self) -> float:
        """From P's answer to D's first token."""
        return self.times[0] - self.answered

    @property
    def kv_wait(self) -> float:
        """From P's answer to the start of D's step that gives the first token: the hand-over without it."""
        return self.began - self.answered

    @property
    def ttft(self) -> float:
        """From the moment the legs leave to D's first token."""
        return self.times[0] - self.sent

    @property
    def steps(self) -> list[float]:
        """D's decode steps: the times between its tokens."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def tpot(self) -> float:
        """Time per output token after the first."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


@dataclass(frozen=True)
class Setup:
    """How one engine is run, beside its arm and role."""

    model: Path
    shape: Shape
    num_blocks: int
    max_tokens: int
    chunk_tokens: int
    logs: Path


class EngineProcess:
    """One engine process; ``send`` and ``receive`` are lines of JSON."""

    def __init__(self, arm: Arm, role: str, port: int, cores: list[int], setup: Setup) -> None:
        self.name = f"{arm.name} {'P' if role == 'kv_producer' else 'D'}"
        self._log = setup.logs / f"{setup.shape.name}-{arm.name}-{role}.log"
        settings = {
            "model": str(setup.model),
            "transfer": arm.transfer_config(role, port),
            "slow_progress": arm.slow_progress,
            "block_tokens": setup.shape.block_tokens,
            "num_blocks": setup.num_blocks,
            "max_tokens": setup.max_tokens,
            "chunk_tokens": setup.chunk_tokens,
            "cores": cores,
            "host": HOST,
            "port": port,
        }
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvpush.bench.serve.engine", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def send(self, do: str, **order: Any) -> None:
        """Send one order."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do} | order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def receive(self) -> dict[str, Any]:
        """Wait for the next answer.

        Raises
        ------
        ServeBenchError
            The process ended; the message has the end of its log.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        return dict(json.loads(line))

    def _died(self) -> ServeBenchError:
        code = self._process.wait()
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        tail = "\n  ".join(lines[-12:])
        return ServeBenchError(f"{self.name} ended with exit code {code}. Its log ends with:\n  {tail}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; an ended process is left alone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def close(self, deadline: float) -> None:
        """End it, killing what is not gone by ``deadline`` (monotonic seconds)."""
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self.signal(signal.SIGCONT)
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Pair:
    """P and D of one arm. Stopped (SIGSTOP) while another arm is measured: NIXL polls also when idle."""

    def __init__(self, arm: Arm, ports: tuple[int, int], setup: Setup) -> None:
        self.arm = arm
        self._port = ports[0]
        self._count = 0
        cores = sorted(os.sched_getaffinity(0))
        half = len(cores) // 2
        self.prefill = EngineProcess(arm, "kv_producer", ports[0], cores[:half] or cores, setup)
        self.decode = EngineProcess(arm, "kv_consumer", ports[1], cores[half:], setup)

    def wait_ready(self) -> None:
        """Return when both engines take orders."""
        for process in (self.prefill, self.decode):
            process.receive()

    def stop(self) -> None:
        """Take both off the processor."""
        for process in (self.prefill, self.decode):
            process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let both run."""
        for process in (self.prefill, self.decode):
            process.signal(signal.SIGCONT)

    def prompts(self, prompts: dict[str, list[int]]) -> None:
        """Give both engines the prompts, by name."""
        for process in (self.prefill, self.decode):
            process.send("prompts", prompts=prompts)
            process.receive()

    def alone(self, prompt: str, max_tokens: int) -> list[int]:
        """Return what D answers without any transfer."""
        self._count += 1
        self.decode.send(
            "request", name=f"alone-{self._count}", prompt=prompt, max_tokens=max_tokens, params=None
        )
        return list(self.decode.receive()["tokens"])

    def run(self, prompt: str, max_tokens: int) -> Sample:
        """Send one request through both engines, as the arm prescribes."""
        self._count += 1
        name = f"bench-{self._count}"
        order = {"name": name, "prompt": prompt}
        params = self.arm.decode_params(name, self._port)
        sent = time.monotonic()
        if not self.arm.sequential:
            self.decode.send("request", **order, max_tokens=max_tokens, params=params)
        self.prefill.send("request", **order, max_tokens=1, params=self.arm.prefill_params(name))
        prefilled = self.prefill.receive()
        if self.arm.sequential:
            self.decode.send("request", **order, max_tokens=max_tokens, params=prefilled["params"])
        decoded = self.decode.receive()
        for process, answer in ((self.prefill, prefilled), (self.decode, decoded)):
            if answer["reason"] != "length":
                raise ServeBenchError(f"{process.name}: a request ended as {answer['reason']!r}")
        return Sample(
            sent=sent,
            answered=prefilled["times"][0],
            began=decoded["began"],
            times=decoded["times"],
            tokens=decoded["tokens"],
            first=prefilled["tokens"],
        )

    def settle(self, order: str, seed: int) -> tuple[Moved, int]:
        """Wait until all blocks are free and order both free lists.

        Returns what moved since the last call and how many tokens D computed itself.
        """
        for i, process in enumerate((self.prefill, self.decode)):
            process.send("settle", order=order, seed=2 * seed + i)
        prefill, decode = self.prefill.receive(), self.decode.receive()
        for process, answer in ((self.prefill, prefill), (self.decode, decode)):
            if answer["used_blocks"]:
                raise ServeBenchError(f"{process.name}: {answer['used_blocks']} blocks stay in use")
        return moved(self.arm, prefill["stats"], decode["stats"]), int(decode["computed"])

    def close(self) -> None:
        """End both processes."""
        deadline = time.monotonic() + _STOP_S
        for process in (self.prefill, self.decode):
            process.close(deadline)

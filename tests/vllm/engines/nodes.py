"""The driver's end of engine processes: start, order, kill, settle."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0


class Nursery:
    """Starts engines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers = itertools.count()
        with (folder / "nursery.log").open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("engine_process.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", (folder / "nursery.log").read_text()[-4000:]

    def start(
        self,
        model: str,
        transfer: dict[str, Any] | None,
        env: dict[str, str] | None = None,
        faults: dict[str, int] | None = None,
        **options: Any,
    ) -> "Node":
        """An engine with these ``EngineArgs``, environment and :func:`kvpush.testing.faults`."""
        name = f"{next(self.numbers)}-{transfer['kv_role'] if transfer else 'alone'}"
        node = Node(self.folder / name)
        spec = {
            "model": model,
            "transfer": transfer,
            "env": env or {},
            "faults": faults or {},
            "options": options,
            "log": str(node.log),
            "trace": str(node.trace_path),
            "socket": node.address,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(spec) + "\n")
        self.process.stdin.flush()
        return node

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


class Node:
    """The driver's end of one engine. Usable after :meth:`ready`; other orders are methods of ``Server``."""

    def __init__(self, path: Path) -> None:
        self.log = path.with_suffix(".log")
        self.trace_path = path.with_suffix(".trace")
        self.address = str(path.with_suffix(".sock"))
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.address)
        self.listener.listen(1)
        self.listener.settimeout(DEADLINE_S)
        self.pid = 0

    def ready(self) -> "Node":
        if not self.pid:
            self.wire, _ = self.listener.accept()
            self.wire.settimeout(DEADLINE_S)
            self.lines = self.wire.makefile("r")
            self.pid = int(self._answer())
        return self

    def _answer(self) -> Any:
        try:
            line = self.lines.readline()
        except TimeoutError as error:
            raise AssertionError(f"no answer\n{self.log.read_text()[-6000:]}") from error
        assert line, f"the engine died:\n{self.log.read_text()[-6000:]}"
        return json.loads(line)

    def call(self, name: str, *args: Any) -> Any:
        self.ready().wire.sendall((json.dumps([name, args]) + "\n").encode())
        return self._answer()

    def add(self, name: str, ids: list[int], max_tokens: int, params: Any = None, **more: Any) -> None:
        self.call("add", name, ids, max_tokens, params, more)

    def wait(self, *names: str) -> dict[str, Any]:
        """Outputs of these requests, once all have ended."""
        return dict(self.call("wait", names))

    def state(self) -> dict[str, Any]:
        return dict(self.call("state"))

    def until(self, what: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Poll the engine's state until ``what`` holds for it."""
        deadline = time.monotonic() + DEADLINE_S
        while not what(state := self.state()):
            assert time.monotonic() < deadline, f"{state}\n{self.log.read_text()[-6000:]}"
            time.sleep(0.002)
        return state

    def status(self, name: str) -> str | None:
        return dict(self.state()["requests"].get(name, {})).get("status")

    def settle(self) -> None:
        """Nothing is left: no request, no block in use, nothing open in connector or engine."""
        self.call("resume")
        self.until(lambda state: not state["requests"] and not state["used_blocks"])

        # An idle engine is not polled: one request of no transfer makes it notice what ended meanwhile.
        def quiet(state: dict[str, Any]) -> bool:
            if not any(state["open"].values()) and not state["requests"] and not state["used_blocks"]:
                return True
            self.add("tick", [1], 1)
            self.wait("tick")
            return False

        self.until(quiet)

    def trace(self, key: str) -> list[dict[str, Any]]:
        """Records of this key's transfers so far."""
        lines = self.trace_path.read_text().splitlines() if self.trace_path.exists() else []
        return [record for record in map(json.loads, lines) if record["key"] == key]

    def kill(self) -> None:
        """kill -9; returns when the process is gone."""
        os.kill(self.ready().pid, signal.SIGKILL)
        assert self.lines.read() == ""
        self._drop()

    def finish(self) -> None:
        """Let it end the normal way; :meth:`close` waits for that."""
        self.wire.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.lines.read()
        self._drop()

    def _drop(self) -> None:
        self.wire.close()
        self.listener.close()

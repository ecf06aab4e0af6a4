"""Server processes of the demo: start, watch, and always end them with everything they started."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import httpx

_POLL_S = 0.25
_STOP_S = 10.0
_KILL_S = 5.0
_EXCEPTION = re.compile(r"\b[\w.]*(Error|Exception|Unsupported|Exhausted): .*")


class ServerError(RuntimeError):
    """A server ended or did not get ready; the message has the end of its log."""


class Terminated(BaseException):
    """SIGTERM came. Not an ``Exception``: nothing but the clean-up shall catch it."""


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into :class:`Terminated` while the block runs, so that clean-up runs too."""

    def raise_terminated(signum: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]


class Server:
    """One process in its own session, its output in one log file."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, url: str) -> None:
        self.name = name
        self.url = url
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(argv),
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # one group with all its workers; Ctrl-C reaches us alone
            )

    @property
    def pid(self) -> int:
        """The process id, which is also its group's id."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, or ``None`` while it runs."""
        return self._process.poll()

    def last_lines(self, count: int = 1) -> list[str]:
        """Return the last non-empty lines of the log."""
        with self.log.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - 16384))
            text = stream.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-count:]

    def first_error(self) -> str | None:
        """Return the first line of the log that names an exception: the end of a log seldom has the cause."""
        with self.log.open(encoding="utf-8", errors="replace") as stream:
            for line in stream:
                found = _EXCEPTION.search(line)
                if found:
                    return found[0].strip()
        return None

    def interrupt(self) -> None:
        """Ask the whole group to end."""
        self._signal(signal.SIGTERM)

    def stop(self, deadline: float) -> None:
        """Wait until ``deadline`` (monotonic seconds) for the group to end, then kill it."""
        while self._group_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        self._process.wait()
        # The leader's children die a moment later.
        deadline = time.monotonic() + _KILL_S
        while self._group_alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _group_alive(self) -> bool:
        self._process.poll()  # reaps the leader
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        # Orphans wait for init to reap them, which in many containers it does late or never.
        return any(group == self.pid and state != "Z" for state, group in _processes())

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def _processes() -> Iterator[tuple[str, int]]:
    """Yield the state letter and the process group of every process."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            state, _, group = entry.read_text().rpartition(")")[2].split()[:3]
            yield state, int(group)


class Servers:
    """A group of servers; leaving the context ends them all, whatever happened."""

    def __init__(self) -> None:
        self._servers: list[Server] = []

    def __enter__(self) -> "Servers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, url: str) -> Server:
        """Start one server. ``url`` is where its ``/health`` will answer."""
        server = Server(name, argv, env, log, url)
        self._servers.append(server)
        return server

    def stop(self) -> None:
        """End all processes. A second Ctrl-C or SIGTERM must not leave some of them behind."""
        handlers = {
            number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            for server in self._servers:
                server.interrupt()
            deadline = time.monotonic() + _STOP_S
            for server in self._servers:
                server.stop(deadline)
            self._servers.clear()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def wait_ready(
        self, waiting: Sequence[Server], timeout_s: float, progress: Callable[[str], None]
    ) -> None:
        """Return when every server's ``/health`` answers 200.

        Raises
        ------
        ServerError
            One of all servers ended, or the time is over.
        """
        import httpx

        pending = list(waiting)
        started = time.monotonic()
        with httpx.Client(trust_env=False, timeout=2.0) as client:
            while pending:
                self.check_alive()
                pending = [server for server in pending if not _healthy(client, server)]
                if not pending:
                    return
                waited_s = time.monotonic() - started
                if waited_s > timeout_s:
                    raise _failure(pending[0], f"is not ready after {timeout_s:.0f} s")
                names = ", ".join(server.name for server in pending)
                last = "".join(pending[0].last_lines())
                progress(f"waiting for {names} ({waited_s:.0f} s): {last}")
                time.sleep(_POLL_S)

    def check_alive(self) -> None:
        """Raise :class:`ServerError` if any server has ended."""
        for server in self._servers:
            code = server.exit_code()
            if code is not None:
                raise _failure(server, f"ended with exit code {code}")


def _healthy(client: "httpx.Client", server: Server) -> bool:
    import httpx

    try:
        return client.get(f"{server.url}/health").is_success
    except httpx.HTTPError:
        return False


def _failure(server: Server, what: str) -> ServerError:
    lines = "\n  ".join(server.last_lines(10))
    first = server.first_error()
    cause = f"\nThe first error in its log: {first}" if first else ""
    return ServerError(f"{server.name} {what}. Its log ends with:\n  {lines}{cause}")

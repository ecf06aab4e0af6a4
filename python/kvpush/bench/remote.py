"""A pair of processes on two hosts: P where the benchmark runs, D where ``kvpush bench peer`` does.

The client opens three connections for each pair: the two that D's process has on one host, too (``serve`` in
pair.py), and one to tell the other host what to do with it. What goes over them is pickled: whoever knows the
secret can run code there.
"""

import contextlib
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import kvpush
from kvpush.config import Config
from kvpush.errors import InvalidArgument, PeerLost

DEFAULT_PORT = 5700


def authkey() -> bytes:
    """Return what both hosts must have.

    Raises
    ------
    InvalidArgument
        There is no secret.
    """
    secret = Config.from_env().secret
    if not secret:
        raise InvalidArgument(
            "a benchmark over two hosts needs the same KVPUSH_SECRET on both (`openssl rand -hex 32`); "
            "whoever has it can run code there"
        )
    return secret.encode()


def parse_peer(text: str) -> tuple[str, int]:
    """Return the address of "HOST" or "HOST:PORT".

    Raises
    ------
    InvalidArgument
        The port is no number.
    """
    host, colon, port = text.rpartition(":")
    if not colon:
        return text, DEFAULT_PORT
    if not port.isdecimal():
        raise InvalidArgument(f"--peer {text!r}: expected HOST or HOST:PORT")
    return host, int(port)


class RemoteProcess:
    """D's process on the other host; the methods are those of a local one."""

    exitcode = None  # nobody tells

    def __init__(self, address: tuple[str, int], args: tuple[Any, ...]) -> None:
        key, pair = authkey(), os.urandom(16)
        try:
            self.pipe, self.peer, self._control = (_connect(address, key, pair) for _ in range(3))
            self._control.send((kvpush.__version__, args))
            problem = self._control.recv()
        except (OSError, EOFError, AuthenticationError) as error:
            raise PeerLost(
                f"no `kvpush bench peer` with this KVPUSH_SECRET at {address[0]}:{address[1]}: {error!r}"
            ) from None
        if problem:
            raise PeerLost(f"{address[0]}: {problem}")

    def signal(self, number: int) -> None:
        """Have this signal sent to the process."""
        with contextlib.suppress(OSError):
            self._control.send(number)

    def kill(self) -> None:
        """End the process: the other host does when the connection ends."""
        self._control.close()

    def join(self, timeout: float) -> None:
        """Do nothing: nobody here depends on its end."""


def serve(
    address: tuple[str, int], target: Callable[..., None], ready: Callable[[int], None] = lambda port: None
) -> None:
    """Start a process for each pair that a client asks for, until this process is interrupted.

    `target` is what D's process runs on one host: it gets the two connections, and the arguments of
    :class:`RemoteProcess`. `ready` is told the port.

    Raises
    ------
    InvalidArgument
        There is no secret.
    """
    started: dict[bytes, list[Connection]] = {}  # by pair, until all three are there
    with Listener(address, authkey=authkey()) as listener:
        ready(int(listener.address[1]))
        while True:
            # Whoever fails on the way is forgotten.
            with contextlib.suppress(OSError, EOFError, AuthenticationError):
                connection = _prompt(listener.accept())
                pair = connection.recv()
                started.setdefault(pair, []).append(connection)
                if len(started[pair]) == 3:
                    _start(started.pop(pair), target)


def _start(connections: list[Connection], target: Callable[..., None]) -> None:
    pipe, peer, control = connections
    version, args = control.recv()
    if version != kvpush.__version__:
        control.send(f"kvpush is {kvpush.__version__} there and {version} here")
        return
    process = multiprocessing.get_context("spawn").Process(
        target=target, args=(pipe, peer, *args), daemon=True
    )
    process.start()
    pipe.close()
    peer.close()
    control.send("")
    threading.Thread(target=_obey, args=(control, process), daemon=True).start()


def _obey(control: Connection, process: Any) -> None:
    """Send the process what signals the client wants; end it with the client."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            os.kill(process.pid, control.recv())
    process.kill()
    process.join()


def _connect(address: tuple[str, int], key: bytes, pair: bytes) -> Connection:
    connection = _prompt(Client(address, authkey=key))
    connection.send(pair)
    return connection


def _prompt(connection: Connection) -> Connection:
    """Make it send small messages at once."""
    with socket.socket(fileno=os.dup(connection.fileno())) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection

"""Bootstrap over ZeroMQ and msgpack: "where are your workers", then offer and answer.

Every byte that arrives is untrusted: sizes and connections are limited, types are checked, garbage gets
an error reply and the listener lives on. Requests are served by a few threads, so that one slow answer
delays nobody else. With a shared secret both ways are signed, the reply over the question's signature.
"""

import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from vllm.logger import init_logger
from zmq.utils.monitor import recv_monitor_message

from kvpush.access import seal, tag_of, unseal
from kvpush.config import SECRET_VARIABLE, check_secret
from kvpush.errors import HandshakeError
from kvpush.vllm.params import BadParamsError

logger = init_logger("vllm." + __name__)

PROTOCOL = 1
MODE = "push"
MAGIC = "kvpush"
MAX_MESSAGE_BYTES = 8 << 20
MAX_CONNECTIONS = 256
DEFAULT_PORT = 5600
_NUM_THREADS = 4
# How often it is tried to listen again where the port was taken meanwhile.
_REBIND_MS = 1000
_QUESTION = "question"
_REPLY = "reply"


class SideChannelError(ConnectionError):
    """The peer refused, did not answer, or is no kvpush side channel; the text says which."""


class Ask(msgspec.Struct, forbid_unknown_fields=False):
    """A question: ``what`` is "workers" or "offer" (then ``body`` is the offer).

    ``nonce`` makes a signed question unlike every other, and so its reply.
    """

    magic: str
    protocol: int
    mode: str
    what: str
    body: bytes = b""
    nonce: bytes = b""


class Worker(msgspec.Struct):
    """Where one worker answers offers, and its engine's hello (older ones send none)."""

    rank: int
    host: str
    port: int
    hello: bytes = b""


class Reply(msgspec.Struct):
    """The answer: ``error`` is "" on success; the rest depends on the question."""

    magic: str
    protocol: int
    mode: str
    error: str = ""
    body: bytes = b""
    engine_id: str = ""
    tp_size: int = 0
    pp_size: int = 0
    workers: list[Worker] = msgspec.field(default_factory=list)


def _reply(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(Reply(MAGIC, PROTOCOL, MODE, **fields))


def shared_secret() -> str:
    """Return ``KVPUSH_SECRET``, or "" for none. Not from vLLM's configuration: vLLM logs that.

    Raises
    ------
    InvalidArgument
        It is too short.
    """
    return check_secret(os.environ.get(SECRET_VARIABLE, ""))


def side_channel_address(vllm_config: Any) -> tuple[str, int]:
    """Host and port of this engine's side channel (base port plus data-parallel index).

    Taken from ``kv_connector_extra_config`` (``side_channel_host``, ``side_channel_port``), else
    ``KVPUSH_SIDE_CHANNEL_HOST/PORT``, else ``VLLM_NIXL_SIDE_CHANNEL_HOST/PORT``, else localhost:5600.

    Raises
    ------
    BadParamsError
        The port is not a number from 1 to 65535.
    """
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    host = extra.get("side_channel_host") or _env("HOST") or "localhost"
    text = extra.get("side_channel_port") or _env("PORT") or DEFAULT_PORT
    try:
        port = int(text) + int(vllm_config.parallel_config.data_parallel_index)
    except (TypeError, ValueError):
        port = 0
    if not 0 < port < 65536:
        raise BadParamsError(f"kvpush: side channel port {text!r}: set KVPUSH_SIDE_CHANNEL_PORT to 1..65535")
    return str(host), port


def _env(name: str) -> str | None:
    prefixes = ("KVPUSH_SIDE_CHANNEL_", "VLLM_NIXL_SIDE_CHANNEL_")
    return next((value for p in prefixes if (value := os.environ.get(p + name))), None)


class SideChannel:
    """A listener at ``host:port`` that answers each message with ``answer(ask) -> reply bytes``.

    ``port`` 0 takes a free one. ``answer`` runs on one of a few threads; what it raises becomes an
    error reply. At more than ``max_connections`` all are dropped: those that asked try again. ``secret``
    is :func:`shared_secret` if not given.

    Raises
    ------
    OSError
        The address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        answer: Callable[[Ask], bytes],
        name: str,
        secret: str | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._answer = answer
        self._secret = shared_secret() if secret is None else secret
        self._max_connections = max_connections
        self._connections: set[int] = set()
        self._listening = True
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._back = self._context.socket(zmq.DEALER)
        self._stop = self._context.socket(zmq.PAIR)
        self._closed = False
        try:
            self._configure(self._front)
            address = resolve(host)
            self._front.setsockopt(zmq.IPV6, int(":" in address))
            self._monitor = self._front.get_monitor_socket(
                zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
            )
            self._front.bind(f"tcp://{bracket(address)}:{port or '*'}")
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise OSError(
                f"kvpush: cannot listen at {host}:{port}: {error}; set KVPUSH_SIDE_CHANNEL_HOST to an "
                f"address of this machine and KVPUSH_SIDE_CHANNEL_PORT to a free port"
            ) from error
        self.host = host
        self._endpoint = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(self._endpoint.rpartition(":")[2])
        self._back.bind("inproc://work")
        self._stop.bind("inproc://stop")
        self._threads = [threading.Thread(target=self._forward, name=name, daemon=True)]
        for _ in range(_NUM_THREADS):
            self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _configure(sock: Any) -> None:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        sock.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        # A peer that holds a connection and is no ZeroMQ, or is dead, does not hold it for long.
        sock.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
        # Per peer, which asks one question at a time.
        sock.setsockopt(zmq.RCVHWM, 2)
        sock.setsockopt(zmq.SNDHWM, 256)
        # A peer that stops reading is forgotten instead of stalling the forwarding thread.
        sock.setsockopt(zmq.SNDTIMEO, 0)

    def _forward(self) -> None:
        stop = self._context.socket(zmq.PAIR)
        stop.connect("inproc://stop")
        poller = zmq.Poller()
        for sock in (self._front, self._back, self._monitor, stop):
            poller.register(sock, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(None if self._listening else _REBIND_MS))
                if stop in ready:
                    break
                if self._monitor in ready or not self._listening:
                    self._watch()
                for source, sink in ((self._front, self._back), (self._back, self._front)):
                    if source in ready:
                        try:
                            sink.send_multipart(source.recv_multipart(), zmq.DONTWAIT)
                        except zmq.ContextTerminated:
                            return
                        except zmq.ZMQError:
                            continue
        except zmq.ContextTerminated:
            pass
        finally:
            self._front.disable_monitor()
            for sock in (stop, self._monitor, self._front, self._back):
                sock.close(linger=0)

    def _watch(self) -> None:
        """Count connections, each known by its descriptor; drop all of them when they are too many."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._connections.add(descriptor)
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._connections.discard(descriptor)
            else:
                self._connections.clear()
                self._listening = False
        try:
            if not self._listening:
                self._front.bind(self._endpoint)
                self._listening = True
            elif len(self._connections) > self._max_connections:
                logger.warning(
                    "kvpush: %d connections at %s: dropping all", len(self._connections), self._endpoint
                )
                # ZeroMQ closes them with the listener, and tells of that (EVENT_CLOSED) when it is done.
                self._connections.clear()
                self._front.unbind(self._endpoint)
        except zmq.ZMQError as error:
            logger.warning("kvpush: %s: %s", self._endpoint, error)

    def _serve(self) -> None:
        sock = self._context.socket(zmq.REP)
        try:
            sock.connect("inproc://work")
            while True:
                frames = sock.recv_multipart()
                sock.send(self._handle(frames))
        except zmq.ZMQError:
            pass  # the context is gone: closed
        finally:
            sock.close(linger=0)

    def _handle(self, frames: list[bytes]) -> bytes:
        try:
            if len(frames) != 1:
                raise SideChannelError(f"one frame expected, got {len(frames)}")
            question = unseal(self._secret, _QUESTION, frames[0])
        except Exception as error:
            return _refusal(error)
        try:
            reply = self._answer(check_ask(question))
        except Exception as error:
            reply = _refusal(error)
        return seal(self._secret, _REPLY, reply, tag_of(frames[0]))

    def close(self) -> None:
        """Stop listening and join the threads. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._stop.send(b"")
        self._threads[0].join()
        self._stop.close(linger=0)
        self._context.term()
        for thread in self._threads[1:]:
            thread.join()


def _refusal(error: Exception) -> bytes:
    return _reply(error=(str(error) or type(error).__name__)[:4096])


def check_ask(question: bytes) -> Ask:
    """Validate one request.

    Raises
    ------
    SideChannelError
        It is malformed, or of another protocol version or mode; both values are named.
    """
    try:
        ask = msgspec.msgpack.decode(question, type=Ask)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise SideChannelError(
            f"not a kvpush request ({error}); this is a kvpush side channel: does the other side run another "
            f"connector?"
        ) from error
    _check_common(ask, "asked")
    return ask


def _check_common(message: Ask | Reply, verb: str) -> None:
    for name, ours in (("magic", MAGIC), ("protocol", PROTOCOL), ("mode", MODE)):
        theirs = getattr(message, name)
        if theirs != ours:
            raise SideChannelError(f"{name} {str(theirs)[:64]!r} {verb}, this side has {ours!r}")


class Directory:
    """Answers "workers": the scheduler's side of the bootstrap."""

    def __init__(
        self, engine_id: str, tp_size: int, pp_size: int, workers: list[tuple[int, str, int, bytes]]
    ) -> None:
        self._reply = _reply(
            engine_id=engine_id, tp_size=tp_size, pp_size=pp_size, workers=[Worker(*one) for one in workers]
        )

    def answer(self, ask: Ask) -> bytes:
        """Reply with the addresses of all workers."""
        if ask.what != "workers":
            raise SideChannelError(f"question {ask.what[:64]!r} asked, the scheduler answers 'workers' only")
        return self._reply


class OfferDesk:
    """Answers "offer" with the engine's answer: a worker's side of the bootstrap."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._engine_answer = answer

    def answer(self, ask: Ask) -> bytes:
        """Reply with the engine's answer; a refusal becomes an error reply with its reason."""
        if ask.what != "offer":
            raise SideChannelError(f"question {ask.what[:64]!r} asked, a worker answers 'offer' only")
        return _reply(body=self._engine_answer(ask.body))


def ask(
    host: str,
    port: int,
    what: str,
    body: bytes,
    timeout_s: float,
    mode: str = MODE,
    secret: str | None = None,
) -> Reply:
    """Ask one question and wait for the reply; safe on any thread.

    ``secret`` is :func:`shared_secret` if not given.

    Raises
    ------
    SideChannelError
        No reply within ``timeout_s``, an unusable reply, or the peer's refusal.
    """
    secret = shared_secret() if secret is None else secret
    context: Any = zmq.Context.instance()
    where = f"{host}:{port}"
    nonce = secrets.token_bytes(16) if secret else b""
    question = seal(secret, _QUESTION, msgspec.msgpack.encode(Ask(MAGIC, PROTOCOL, mode, what, body, nonce)))
    sock = context.socket(zmq.REQ)
    try:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        sock.setsockopt(zmq.IPV6, 1)
        sock.connect(f"tcp://{bracket(host)}:{port}")
        sock.send(question)
        if not sock.poll(max(1, int(timeout_s * 1000))):
            raise SideChannelError(f"{where} did not answer {what!r} within {timeout_s:g} s")
        reply = _open_reply(secret, sock.recv(), tag_of(question))
    except (zmq.ZMQError, HandshakeError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise SideChannelError(f"{where}: {error}") from error
    finally:
        sock.close(linger=0)
    if reply.error:
        raise SideChannelError(f"{where} refused: {reply.error}")
    _check_common(reply, f"answered by {where}")
    return reply


def _open_reply(secret: str, sealed: bytes, question: bytes) -> Reply:
    try:
        return msgspec.msgpack.decode(unseal(secret, _REPLY, sealed, question), type=Reply)
    except HandshakeError as error:
        # A peer without the secret, or with another one, cannot sign its refusal. It is shown, not believed.
        try:
            said = msgspec.msgpack.decode(sealed, type=Reply).error
        except (msgspec.DecodeError, msgspec.ValidationError):
            said = ""
        raise HandshakeError(f"{error}; unsigned, it says: {said[:512]}" if said else str(error)) from None


def resolve(host: str) -> str:
    """Return the address of ``host`` to bind to.

    Raises
    ------
    OSError
        The name does not resolve.
    """
    if host in ("*", "0.0.0.0", "::"):
        return host
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    infos.sort(key=lambda info: info[0] != socket.AF_INET)
    return str(infos[0][4][0])


def bracket(host: str) -> str:
    """``host`` as it stands in a ZeroMQ endpoint: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host

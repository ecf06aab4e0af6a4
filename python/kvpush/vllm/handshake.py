"""D's sessions with prefill engines: one hand-shake per peer, in the background, kept until lost."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger

from kvpush.vllm.params import Remote
from kvpush.vllm.side_channel import SideChannelError, ask

logger = init_logger("vllm." + __name__)

ASK_SECONDS = 5.0
"""How long one question to a peer may take; a hand-shake asks two, and one for each further transport."""
MEASURE_SECONDS = 1.0
"""How long the measurement of a new session may take."""
MAX_THREADS = 32

Address = tuple[str, int]


@dataclass
class Outcome:
    """A hand-shake that ended: ``peer`` on success, else ``error``."""

    address: Address
    peer: str | None
    error: str
    seconds: float


class Handshakes:
    """Background hand-shakes, at most one at a time per address.

    All methods belong to the worker's thread; only :meth:`_run` and what it calls run elsewhere.
    """

    def __init__(self, engine: Any, rank: int, tp_size: int, pp_size: int) -> None:
        self._engine = engine
        self._rank = rank
        self._sizes = {"tp_size": tp_size, "pp_size": pp_size}
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="kvpush-handshake")
        self._running: dict[Address, Future[Outcome]] = {}
        self._peers: dict[Address, str] = {}
        # Keys to withdraw when the hand-shake ends, and hand-shakes that take no more of them.
        self._lock = threading.Lock()
        self._withdrawn: dict[Address, list[str]] = {}
        self._ended: set[Address] = set()
        self._closing = threading.Event()

    def peer(self, address: Address) -> str | None:
        """Return the established peer at this address, or None."""
        return self._peers.get(address)

    def start(self, remote: Remote) -> None:
        """Begin a hand-shake unless one is under way."""
        address = (remote.host, remote.port)
        if address not in self._running:
            self._running[address] = self._pool.submit(self._run, remote)

    def withdraw(self, address: Address, key: str) -> bool:
        """Let the hand-shake under way tell the peer that this key is not wanted; False if it just ended.

        An engine without work is not stepped: nobody else would tell it, and P would hold its blocks.
        """
        with self._lock:
            if address not in self._running or address in self._ended:
                return False
            self._withdrawn.setdefault(address, []).append(key)
            return True

    def poll(self) -> list[Outcome]:
        """Return the hand-shakes that ended since the last call; never waits."""
        ended = [future.result() for future in self._running.values() if future.done()]
        for outcome in ended:
            del self._running[outcome.address]
            self._ended.discard(outcome.address)
            if outcome.peer is not None:
                self._peers[outcome.address] = outcome.peer
        return ended

    def lost(self, peer: str) -> None:
        """Forget a session; the next request at its address starts anew."""
        self._peers = {address: known for address, known in self._peers.items() if known != peer}

    def close(self) -> None:
        """Stop; hand-shakes under way end by themselves within their time limits."""
        self._closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, remote: Remote) -> Outcome:
        begin = time.monotonic()
        address = (remote.host, remote.port)
        try:
            peer, error = self._connect(remote, ask), ""
        except Exception as failure:
            peer, error = None, f"hand-shake with {remote.host}:{remote.port} failed: {failure}"
        with self._lock:
            self._ended.add(address)
            withdrawn = self._withdrawn.pop(address, [])
        for key in withdrawn if peer is not None else ():
            try:
                self._engine.expect(peer, key).cancel()
            except Exception as failure:
                logger.info("kvpush: withdrawing key %s: %s", key, failure)
        return Outcome(address, peer, error, time.monotonic() - begin)

    def _connect(self, remote: Remote, question: Callable[..., Any]) -> str:
        directory = question(remote.host, remote.port, "workers", b"", ASK_SECONDS)
        for name, ours in self._sizes.items():
            theirs = getattr(directory, name)
            if theirs != ours:
                raise SideChannelError(f"{name} of the prefill engine is {theirs}, here it is {ours}")
        if directory.engine_id != remote.engine_id:
            logger.warning(
                "kvpush: the engine at %s:%d is %s, the request named %s; a restarted engine?",
                remote.host,
                remote.port,
                directory.engine_id[:128],
                remote.engine_id[:128],
            )
        workers = [worker for worker in directory.workers if worker.rank == self._rank]
        if len(workers) != 1 or not 0 < workers[0].port < 65536:
            raise SideChannelError(f"the prefill engine names no usable worker of rank {self._rank}")
        host = remote.host if workers[0].host in ("*", "0.0.0.0", "::") else workers[0].host
        if self._closing.is_set():
            raise SideChannelError("this engine is shutting down")
        return self._fastest((host, workers[0].port), workers[0].hello, question)

    def _fastest(self, worker: Address, hello: bytes, question: Callable[..., Any]) -> str:
        """Return a session over the transport that the engine chooses, or over the next if that is slow."""
        best, best_transport, best_rate = "", "", 0.0
        floor = self._engine.config.min_link_gb_per_s
        tried: set[str] = set()
        while True:
            try:
                peer = self._open(worker, hello, question)
                transport, rate = self._engine.link(peer, MEASURE_SECONDS)
            except Exception as failure:
                if not best:
                    raise
                logger.info("kvpush: no other transport to %s:%d: %s", *worker, failure)
                break
            if not best or rate > best_rate:
                best, peer = peer, best
                best_transport, best_rate = transport, rate
            if peer:
                self._engine.disconnect(peer)
            may_choose = bool(hello) and self._engine.config.transport == "auto"
            if not may_choose or rate == 0.0 or rate >= floor or transport in tried:
                break
            tried.add(transport)
        measured = f"{best_rate:.2f} GB/s" if best_rate else "not measured"
        is_slow = 0.0 < best_rate < floor
        logger.log(
            logging.WARNING if is_slow else logging.INFO,
            "kvpush: session %s with %s:%d over %s: %s%s",
            best,
            *worker,
            best_transport,
            measured,
            f", below min_link_gb_per_s ({floor:g})" if is_slow else "",
        )
        return best

    def _open(self, worker: Address, hello: bytes, question: Callable[..., Any]) -> str:
        offer = self._engine.offer(hello or None)
        try:
            reply = question(*worker, "offer", offer, ASK_SECONDS)
            return str(self._engine.establish(reply.body))
        except Exception:
            self._engine.withdraw(offer)
            raise

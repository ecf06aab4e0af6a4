"""The engine as Python sees it: the native one, tied to the arrays it works on."""

from types import TracebackType
from typing import Final

from kvpush import _core, access
from kvpush.cache import Cache
from kvpush.config import Config, fabric_libraries, find_nixl_library
from kvpush.errors import InvalidArgument

_LEFT: Final[list[Cache | None]] = []
"""Caches that a copy may still touch although their engine is closed."""


class Engine(_core.Engine):
    """One worker's end of all its KV transfers: pushes prompts (P), receives them (D), or both.

    A context manager; leaving it closes the engine. It keeps the arrays of its cache alive until then.

    Parameters
    ----------
    cache : Cache
        The arrays, each of shape [B, H, N, C], in host memory or all on one CUDA device, and the model's
        fingerprint.
    config : Config, optional
        ``Config.from_env()`` if not given.

    Raises
    ------
    InvalidArgument
        Cache and configuration do not fit; the message names the plane or field and the values.
    Unsupported
        The transport is not available here; ``kvpush.transports()`` says why. Or the cache is on a CUDA
        device, and the driver, the device, or the kernels of this installation are missing.

    Notes
    -----
    Threads: every method may be called from any thread and releases the GIL; one thread polls. ``push``,
    ``receive``, ``advance`` and their like copy what they are given and return at once; ``offer``,
    ``answer``, ``establish``, ``retract`` and ``close`` wait, but never for a peer.

    Every push and every receive ends with exactly one event of :meth:`poll`. Its blocks must be left alone
    until then, and are the caller's again afterwards. Times are in seconds, sizes in bytes. Block ids are any
    integer sequence or array, one per position; -1 is a position that this side does not hold or want.

    A closed engine raises :class:`kvpush.ClosedError`.

    Examples
    --------
    ``p`` pushes, ``d`` receives; the two blobs travel by any side channel::

        peer = d.establish(p.answer(d.offer(p.hello())))

        push = p.push("request-1", digest=b"tokens")
        recv = d.receive(peer, "request-1", digest=b"tokens", blocks=[[3, 9]])
        push.advance([[7, 1]])
        push.finish()

        for event in d.poll(timeout=1.0):
            print(event.kind, event.key, event.bytes)
    """

    def __init__(self, cache: Cache, config: Config | None = None) -> None:
        if not isinstance(cache, Cache):
            raise InvalidArgument(f"cache is a {type(cache).__name__}: expected a kvpush.Cache")
        config = Config.from_env() if config is None else config
        super().__init__(cache.to_core(), config.to_core())
        self._config = config
        self._secret = config.secret
        self._cache: Cache | None = cache

    @property
    def config(self) -> Config:
        """The configuration this engine was made with."""
        return self._config

    def hello(self) -> bytes:
        """P: what D may choose a transport by: which ones this engine has, and on which host it is.

        The first call looks at the machine: 100 ms where libraries must look at devices. It holds for the
        engine's life, and D need not have it.
        """
        return access.seal_hello(self._secret, super().hello())

    def offer(self, peer: bytes | None = None) -> bytes:
        """D: open a landing for one peer and describe it and the cache.

        Parameters
        ----------
        peer : bytes, optional
            The peer's :meth:`hello`. With ``transport="auto"`` the offer is over the best transport that both
            have: shared memory on one host, else over RDMA, else over TCP; one that was measured to be
            slower than ``min_link_gb_per_s``, or does not work, gives way to the next. Without it the offer
            is over the first transport of this engine ("auto": shared memory). The first offer over a
            transport opens it, which takes some 100 ms.

        Raises
        ------
        Exhausted
            ``landing_bytes`` is spent and no session is idle.
        HandshakeError
            The two have no transport in common (both lists are named), or the hello does not prove the shared
            secret.
        """
        hello = b"" if peer is None else access.unseal_hello(self._secret, peer)
        return access.seal_offer(self._secret, super().offer(hello))

    def answer(self, offer: bytes) -> bytes:
        """P: take D's offer. The same offer gets the same answer.

        Raises
        ------
        HandshakeError
            A field does not fit (both values are named), or the offer does not prove the shared secret.
        Exhausted
            A limit of sessions or memory is reached.
        """
        offer = access.unseal_offer(self._secret, offer)
        return access.seal_answer(self._secret, offer, super().answer(offer))

    def establish(self, answer: bytes) -> str:
        """D: take P's answer; returns the peer, to be named in ``expect`` and ``receive``.

        Raises
        ------
        HandshakeError
            It answers no open offer of this engine, does not prove the shared secret, or P cannot be reached.
        """
        return super().establish(access.unseal_answer(self._secret, self.incarnation, answer))

    def withdraw(self, offer: bytes) -> None:
        """D: take back an offer that nobody will answer; its landing is free at once.

        Does nothing once the offer was established or has expired.

        Raises
        ------
        HandshakeError
            The offer is another engine's.
        """
        super().withdraw(access.unseal_offer(self._secret, offer))

    def close(self) -> None:
        """Fail what is open, say goodbye to every peer, and let go of the arrays.

        Waits for ``close_timeout_s`` at most. Arrays that a copy may still touch then are kept until the
        process ends (``cache_in_use``). Closing twice does nothing.
        """
        super().close()
        if self.cache_in_use:
            _LEFT.append(self._cache)
        self._cache = None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The attributes of an object go before its native part: without this the arrays would be freed
        # under an engine that still copies.
        if getattr(self, "_cache", None) is not None:
            self.close()


def transports() -> dict[str, str]:
    """Return which transports this build and machine can use: name to "" or to the reason why not.

    Opens each for a moment; NIXL takes some 100 ms.
    """
    config = Config.from_env()
    return _core.transports(
        config.nixl_library or find_nixl_library() or "",
        fabric_libraries(config.fabric_library),
        config.fabric_provider,
        config.fabric_rails,
    )


def paths(config: Config | None = None) -> list[tuple[str, str, str]]:
    """Return what an engine with this configuration chooses from, without opening anything.

    ``(name, reach, rank)`` each, best first: it leads to engines that have the same name with the same reach
    (of "shm" the host, of "fabric" the provider); rank is "host", "rdma" or "network". Loads libfabric, if it
    is there.
    """
    config = Config.from_env() if config is None else config
    found = _core.paths(config.to_core())
    return sorted(found, key=lambda path: ("host", "rdma", "network").index(path[2]))

"""For tests of what is built on top of the engine: a fake one in pure Python, and faults for the real one.

:class:`FakeEngine` has the methods of :class:`kvpush.Engine` and really moves data between arrays of one
process. Engines find each other through a :class:`FakeNetwork`. Everything happens inside the calls, so
tests need no waiting. ``auto=False`` moves nothing: the test delivers every event by :meth:`FakeEngine.emit`.
:func:`faults` makes the transport of a real engine fail at a chosen operation.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpush.config import Config
from kvpush.errors import ClosedError, DuplicateKey, HandshakeError, InvalidArgument, PeerLost

__all__ = ["FakeClaim", "FakeEngine", "FakeEvent", "FakeNetwork", "FakePush", "FakeReceive", "faults"]

_handles = itertools.count(1)


@contextlib.contextmanager
def faults(*, fail_post_before: int = 0, fail_post_after: int = 0, lose_at_send: int = 0) -> Iterator[None]:
    """Break the transport of every real engine that is made in this context; not thread-safe.

    Parameters
    ----------
    fail_post_before
        The n-th box that the transport accepts is not written, and reported as failed. 0: never.
    fail_post_after
        The n-th box that the transport accepts is written, and reported as of unknown fate.
    lose_at_send
        The transport refuses the n-th message or box: its session is lost.
    """
    values = {
        "fail_post_before": fail_post_before,
        "fail_post_after": fail_post_after,
        "lose_at_send": lose_at_send,
    }
    to_core = Config.to_core
    Config.to_core = lambda self: to_core(self) | {"faults": values}  # type: ignore[method-assign]
    try:
        yield
    finally:
        Config.to_core = to_core  # type: ignore[method-assign]


@dataclass
class FakeEvent:
    """Has the fields of :class:`kvpush.Event`."""

    kind: str
    side: str = ""
    handle: int = 0
    key: str = ""
    transfer: int = 0
    peer: str = ""
    status: str = ""
    detail: str = ""
    bytes: int = 0
    boxes: int = 0
    timings: dict[str, int] = field(default_factory=dict)


class FakeNetwork:
    """Engines by incarnation, and the one lock of them all."""

    def __init__(self) -> None:
        self.engines: dict[str, FakeEngine] = {}
        self.lock = threading.RLock()


class FakePush:
    """A push; ``blocks[g]`` are the data handed out so far, one entry per position (None for a hole)."""

    def __init__(self, engine: "FakeEngine", key: str, digest: bytes) -> None:
        self.engine, self.key, self.digest = engine, key, digest
        self.handle = next(_handles)
        self.blocks: list[list[Any]] = [[] for _ in engine.groups]
        self.finished = False
        self.ended = False
        self.claims: list[FakeClaim] = []

    def advance(self, blocks: Sequence[Sequence[int]], after: int | None = None) -> None:
        """Copy these blocks, next in order."""
        self.engine.note("advance", self.key, [list(ids) for ids in blocks])
        if self.ended:
            return
        if len(blocks) != len(self.blocks):
            raise InvalidArgument(f"{len(blocks)} groups given, the cache has {len(self.blocks)}")
        with self.engine.network.lock:
            for g, ids in enumerate(blocks):
                self.blocks[g].extend(self.engine.copy_out(g, block) for block in ids)

    def retract(self) -> list[int]:
        """Fence; everything handed out is copied already. Reopens a finished push."""
        self.engine.note("retract", self.key)
        self.finished = False
        return [len(part) for part in self.blocks]

    def finish(self) -> None:
        """No more blocks."""
        self.engine.note("finish", self.key)
        with self.engine.network.lock:
            self.finished = True
            self.engine.settle(self)

    def abort(self, reason: str = "aborted") -> None:
        """Give up; claims fail."""
        self.engine.note("abort", self.key, reason)
        if self.engine.auto:
            self.engine.end_push(self, "failed", "aborted", reason)


class FakeReceive:
    """A receive into ``blocks[g][i]`` of positions ``first[g] + i``."""

    def __init__(self, claim: "FakeClaim", digest: bytes, blocks: Any, first: Any) -> None:
        self.claim, self.digest = claim, digest
        self.engine, self.key, self.transfer = claim.engine, claim.key, claim.transfer
        self.handle = next(_handles)
        self.blocks = [list(ids) for ids in blocks]
        self.first = list(first) if first is not None else [0] * len(self.blocks)
        self.ended = False

    def cancel(self) -> None:
        """End now."""
        self.engine.note("cancel_receive", self.key)
        if self.engine.auto:
            self.claim.withdraw()
            self.engine.end_receive(self, "failed", "cancelled", "cancelled here")


class FakeClaim:
    """A claim of a key at a peer."""

    def __init__(self, engine: "FakeEngine", peer: str, key: str) -> None:
        self.engine, self.peer, self.key = engine, peer, key
        self.transfer = next(_handles)
        self.recv: FakeReceive | None = None

    def receive(self, digest: bytes, blocks: Any, first: Any = None, after: int | None = None) -> FakeReceive:
        """Open the transfer."""
        self.engine.check("receive")
        self.engine.note("receive", self.key, [list(ids) for ids in blocks], list(first or ()))
        self.recv = FakeReceive(self, digest, blocks, first)
        self.engine.receives[self.recv.handle] = self.recv
        if self.engine.auto:
            self.engine.open(self)
        return self.recv

    def cancel(self) -> None:
        """Withdraw it; the push is dropped when its last claim is gone."""
        self.engine.note("cancel_claim", self.key)
        self.withdraw()

    def withdraw(self) -> None:
        """Take the claim off its push."""
        peer = self.engine.network.engines.get(self.peer)
        push = peer.pushes.get(self.key) if peer is not None else None
        if peer is not None and push is not None and self in push.claims:
            push.claims.remove(self)
            if not push.claims and self.engine.auto:
                peer.end_push(push, "failed", "cancelled", "its last claim was withdrawn")


class FakeEngine:
    """See the module.

    Parameters
    ----------
    spec
        Anything with ``groups[g].planes[p].array`` (indexable by block id) and ``fingerprint``.
    network
        Whom it can reach.
    auto
        Whether transfers happen by themselves.
    """

    transport = "fake"

    def __init__(self, spec: Any, network: FakeNetwork | None = None, auto: bool = True) -> None:
        self.network = network or FakeNetwork()
        self.groups = list(spec.groups)
        self.fingerprint = dict(getattr(spec, "fingerprint", {}))
        self.auto = auto
        self.incarnation = f"fake-{next(_handles)}"
        self.network.engines[self.incarnation] = self
        self.pushes: dict[str, FakePush] = {}
        self.receives: dict[int, FakeReceive] = {}
        self.pending: dict[str, list[FakeClaim]] = {}
        self.tombstones: dict[str, tuple[str, str]] = {}
        self.events: list[FakeEvent] = []
        self.calls: list[tuple[Any, ...]] = []
        self.raises: dict[str, list[Exception]] = {}
        self.closed = False
        self.network_ops = 0
        self.config = Config()
        self.rates: list[tuple[str, float]] = []  # what link() answers next

    # ---- for tests -----------------------------------------------------------------------------

    def note(self, *call: Any) -> None:
        """Record a call."""
        self.calls.append(call)

    def called(self, name: str) -> list[tuple[Any, ...]]:
        """Return the recorded calls of one name, without it."""
        return [call[1:] for call in self.calls if call[0] == name]

    def emit(self, kind: str, handle: Any = None, **fields: Any) -> None:
        """Deliver an event, of a push or receive if given."""
        if handle is not None:
            side = "push" if isinstance(handle, FakePush) else "receive"
            handle.ended = True
            fields = {"side": side, "handle": handle.handle, "key": handle.key, **fields}
            if isinstance(handle, FakePush) and self.pushes.get(handle.key) is handle:
                del self.pushes[handle.key]
            if isinstance(handle, FakeReceive):
                self.receives.pop(handle.handle, None)
        self.events.append(FakeEvent(kind, **fields))

    def lose(self, peer: str, status: str = "peer_lost") -> None:
        """Lose a session: its receives fail, then ``lost``."""
        for recv in list(self.receives.values()):
            if recv.claim.peer == peer:
                self.end_receive(recv, "failed", status, "session lost")
        self.emit("lost", peer=peer, status=status)

    def check(self, name: str) -> None:
        """Raise what the test put in ``raises[name]``, or ClosedError."""
        if self.closed:
            raise ClosedError("the engine is closed")
        if self.raises.get(name):
            raise self.raises[name].pop(0)

    # ---- as kvpush.Engine ----------------------------------------------------------------------

    def hello(self) -> bytes:
        """Return what D may choose a transport by."""
        self.check("hello")
        return b"hello:" + self.incarnation.encode()

    def link(self, peer: str, timeout: float = 0.0) -> tuple[str, float]:
        """Return the session's transport and what :attr:`rates` says of it."""
        self.check("link")
        return self.rates.pop(0) if self.rates else (self.transport, 0.0)

    def disconnect(self, peer: str) -> None:
        """End a session."""
        self.check("disconnect")
        self.note("disconnect", peer)

    def offer(self, peer: bytes | None = None) -> bytes:
        """Return an offer."""
        self.check("offer")
        self.note("offer", peer)
        return b"offer:" + self.incarnation.encode()

    def answer(self, offer: bytes) -> bytes:
        """Return the answer to an offer, or raise HandshakeError."""
        self.check("answer")
        kind, _, name = offer.decode("utf-8", "replace").partition(":")
        peer = self.network.engines.get(name)
        if kind != "offer" or peer is None:
            raise HandshakeError("not an offer")
        for key, ours in self.fingerprint.items():
            theirs = peer.fingerprint.get(key)
            if theirs != ours:
                raise HandshakeError(f"{key} is {theirs!r} there and {ours!r} here")
        return b"answer:" + self.incarnation.encode()

    def establish(self, answer: bytes) -> str:
        """Return the peer's id."""
        self.check("establish")
        return answer.decode().partition(":")[2]

    def withdraw(self, offer: bytes) -> None:
        """Take back an offer."""
        self.check("withdraw")
        self.note("withdraw", offer)

    def push(self, key: str, digest: bytes) -> FakePush:
        """Open a push."""
        self.check("push")
        self.note("push", key)
        if key in self.pushes:
            raise DuplicateKey(f"a push of key {key!r} is open")
        self.tombstones.pop(key, None)
        push = self.pushes[key] = FakePush(self, key, digest)
        push.claims.extend(self.pending.pop(key, ()))
        return push

    def expect(self, peer: str, key: str) -> FakeClaim:
        """Claim a key."""
        self.check("expect")
        other = self.network.engines.get(peer)
        if other is None or other.closed:
            raise PeerLost(f"no session with {peer}")
        self.note("expect", key)
        claim = FakeClaim(self, peer, key)
        push = other.pushes.get(key)
        if push is not None:
            push.claims.append(claim)
        else:
            other.pending.setdefault(key, []).append(claim)
        return claim

    def receive(
        self, peer: str, key: str, digest: bytes, blocks: Any, first: Any = None, after: int | None = None
    ) -> FakeReceive:
        """Claim and open in one."""
        return self.expect(peer, key).receive(digest, blocks, first, after)

    def evict(self, count: int = 1) -> None:
        """Fail the oldest finished pushes that nobody opened."""
        self.note("evict", count)
        idle = [p for p in self.pushes.values() if p.finished and not any(c.recv for c in p.claims)]
        for push in idle[:count]:
            self.end_push(push, "failed", "evicted", "short of blocks")

    def poll(self, timeout: float = 0.0) -> list[FakeEvent]:
        """Return the events so far."""
        self.check("poll")
        with self.network.lock:
            events, self.events = self.events, []
        return events

    def stats(self) -> dict[str, Any]:
        """Return counters."""
        return {"network_ops": self.network_ops}

    def close(self) -> None:
        """Close; may be called twice."""
        self.closed = True
        self.network.engines.pop(self.incarnation, None)

    # ---- moving data ---------------------------------------------------------------------------

    def copy_out(self, g: int, block: int) -> list[Any] | None:
        """Copy one block of group g; None for a hole."""
        if block < 0:
            return None
        return [plane.array[block].clone() for plane in self.groups[g].planes]

    def open(self, claim: FakeClaim) -> None:
        """Pair an opened claim if its push is finished; fail it if its key has a tombstone."""
        peer = self.network.engines.get(claim.peer)
        if peer is None or claim.recv is None:
            return
        if claim.key in peer.tombstones:
            self.end_receive(claim.recv, "failed", *peer.tombstones[claim.key])
        elif claim.key in peer.pushes:
            peer.settle(peer.pushes[claim.key])

    def settle(self, push: FakePush) -> None:
        """Serve the first opened claim of a finished push."""
        if not push.finished or not self.auto:
            return
        for claim in list(push.claims):
            recv = claim.recv
            if recv is None or recv.ended:
                continue
            if recv.digest != push.digest:
                claim.engine.end_receive(recv, "failed", "digest_mismatch", "another prompt")
                push.claims.remove(claim)
                continue
            moved = self._deliver(push, recv)
            if moved is None:
                claim.engine.end_receive(recv, "failed", "missing", "positions that were never pushed")
                self.end_push(push, "failed", "missing", "positions that were never pushed")
            else:
                claim.engine.end_receive(recv, "received", "ok", "", moved)
                self.end_push(push, "sent", "ok", "", moved)
            return

    def _deliver(self, push: FakePush, recv: FakeReceive) -> int | None:
        moved = 0
        for g, (first, ids) in enumerate(zip(recv.first, recv.blocks, strict=True)):
            for position, block in enumerate(ids, first):
                if block < 0:
                    continue
                have = push.blocks[g][position] if position < len(push.blocks[g]) else None
                if have is None:
                    return None
                for plane, data in zip(recv.engine.groups[g].planes, have, strict=True):
                    plane.array[block].copy_(data)
                    moved += data.numel() * data.element_size()
        self.network_ops += 1
        return moved

    def end_push(self, push: FakePush, kind: str, status: str, detail: str, moved: int = 0) -> None:
        """Deliver a push's one terminal event; claims of a failed one fail."""
        if push.ended:
            return
        self.emit(kind, push, status=status, detail=detail, bytes=moved, boxes=int(moved > 0))
        if kind == "failed":
            self.tombstones[push.key] = (status, detail)
            for claim in push.claims:
                if claim.recv is not None:
                    claim.engine.end_receive(claim.recv, "failed", status, detail)

    def end_receive(self, recv: FakeReceive, kind: str, status: str, detail: str, moved: int = 0) -> None:
        """Deliver a receive's one terminal event."""
        if not recv.ended:
            self.emit(kind, recv, status=status, detail=detail, bytes=moved, boxes=int(moved > 0))

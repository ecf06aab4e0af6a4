"""What the scheduler half tells the worker half in one step, and what workers tell the scheduler once.

Plain, picklable data. All block id lists are copies: vLLM extends its own in place.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from kvpush.vllm.params import Remote

BlockIds = tuple[list[int], ...]
"""Block ids per transfer group, in position order; -1 is a hole."""


@dataclass
class NewPush:
    """P: a request will be prefilled; an ``error`` opens the key only to fail its claims at once."""

    req_id: str
    key: str
    digest: bytes
    error: str | None = None


@dataclass
class Advance:
    """P: after this step's forward, positions ``first[g] + i`` of group g are in ``blocks[g][i]``."""

    req_id: str
    first: list[int]
    blocks: BlockIds
    finish: bool


@dataclass
class Close:
    """P: vLLM finished the request. ``delayed``: its blocks wait for the id in finished_sending."""

    req_id: str
    delayed: bool
    abort: str | None


@dataclass
class Intent:
    """D: a request will want this key."""

    req_id: str
    key: str
    remote: Remote


@dataclass
class Fetch:
    """D: a load was promised to vLLM: receive into these blocks, or fail it with ``error``.

    ``blocks[g][i]`` is where position ``first[g] + i`` of group g goes.
    """

    req_id: str
    key: str
    remote: Remote | None
    digest: bytes
    first: list[int]
    blocks: BlockIds
    error: str | None = None


@dataclass
class KVPushMetadata(KVConnectorMetadata):
    """One step's orders, carried out in the order of these fields (``advances`` after the forward)."""

    retracts: list[str] = field(default_factory=list)
    closes: list[Close] = field(default_factory=list)
    pushes: list[NewPush] = field(default_factory=list)
    intents: list[Intent] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    evict: int = 0
    advances: list[Advance] = field(default_factory=list)


@dataclass
class WorkerAddress(KVConnectorHandshakeMetadata):
    """Where one worker answers offers, and what its engine tells D before: ``kvpush.Engine.hello()``."""

    rank: int
    host: str
    port: int
    hello: bytes = b""

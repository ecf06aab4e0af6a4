"""The arms ``nixl-per-block`` and ``nixl-one-descriptor``: NIXL from Python, as vLLM's connectors use it.

As in vLLM's NixlPushConnector: an agent with four threads and telemetry, descriptor lists over every block of
every layer prepared once, per transfer one prepared request with the indices of its blocks, and a
notification to the target. The layers are one registered region here.
"""

import importlib
import importlib.util
import json
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpush.bench.arms import End
from kvpush.bench.cases import Case
from kvpush.bench.memory import Memory
from kvpush.bench.tables import Batch, Spans, block_spans, piece, piece_spans
from kvpush.errors import TransportError

PER_BLOCK, ONE = "per-block", "one"
POLL, SLEEP = "poll", "sleep"
_MODULES = ("nixl", "nixl_cu13", "nixl_cu12")
_LOCAL = "NIXL_INIT_AGENT"
_SLEEP_S = 0.001  # vLLM's poll interval
_WAIT_S = 60.0


def find_module() -> str:
    """Return the importable package that has NIXL's Python API, or ""."""
    for name in _MODULES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:  # a folder that happens to have this name has none
            return name
    return ""


class NixlEnd(End):
    """One agent over `memory`. Modes: "per-block/poll", "one/sleep", ..."""

    def __init__(self, memory: Memory, is_source: bool) -> None:
        # As vLLM does; read when UCX is loaded.
        os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        api = importlib.import_module(find_module())
        self._base = memory.address
        self._device = max(0, memory.device)
        self._kind_of_memory = "DRAM" if memory.device < 0 else "VRAM"
        self._name = f"bench-{'p' if is_source else 'd'}-{os.getpid()}"
        config = api.nixl_agent_config(num_threads=4, capture_telemetry=True)
        self._agent = api.nixl_agent(self._name, config)
        self._agent.register_memory([(self._base, len(memory), self._device, "")], self._kind_of_memory)
        self.mode = f"{PER_BLOCK}/{POLL}"
        self._case: Case | None = None
        self._sides: dict[str, tuple[Any, Any]] = {}  # kind to the prepared lists, ours and theirs
        self._remote: tuple[str, int] | None = None
        self._posted: list[Any] = []
        self._arrived: dict[bytes, int] = {}
        self._ops = 0

    def begin(self, case: Case) -> bool:
        geometry = (case.block_bytes, case.num_layers, case.total_bytes)
        if self._case is not None and geometry != (
            self._case.block_bytes,
            self._case.num_layers,
            self._case.total_bytes,
        ):
            self._release_lists()
        self._case = case
        return self._remote is None

    def offer(self) -> bytes:
        return self._description()

    def answer(self, offer: bytes) -> bytes:
        self._learn(offer)
        return self._description()

    def establish(self, answer: bytes) -> None:
        self._learn(answer)

    def _description(self) -> bytes:
        metadata = self._agent.get_agent_metadata()
        return json.dumps([self._base, metadata.hex()]).encode()

    def _learn(self, description: bytes) -> None:
        base, metadata = json.loads(description)
        self._remote = (_text(self._agent.add_remote_agent(bytes.fromhex(metadata))), base)

    def _lists(self) -> tuple[Any, Any]:
        assert self._case is not None
        assert self._remote is not None
        if self._kind not in self._sides:
            case = self._case
            length = case.block_bytes if self._kind == PER_BLOCK else case.total_bytes
            blocks = (
                case.num_layers * case.num_blocks if self._kind == PER_BLOCK else case.cache_bytes // length
            )
            name, base = self._remote
            self._sides[self._kind] = (
                self._agent.prep_xfer_dlist(_LOCAL, self._descriptors(self._base, blocks, length)),
                self._agent.prep_xfer_dlist(name, self._descriptors(base, blocks, length)),
            )
        return self._sides[self._kind]

    def _descriptors(self, base: int, count: int, length: int) -> Any:
        rows: Any = np.zeros((count, 3), dtype=np.uint64)
        rows[:, 0] = base + np.arange(count, dtype=np.uint64) * np.uint64(length)
        rows[:, 1] = length
        rows[:, 2] = self._device
        return self._agent.get_xfer_descs(rows, self._kind_of_memory)

    def submit(self, batch: Batch) -> list[int]:
        # vLLM computes these indices within its push; they are not counted here, in NIXL's favour.
        local, remote = self._lists()
        indices = [self._indices(batch, i) for i in range(len(batch.transfers))]
        started = []
        for one, (sources, targets) in zip(batch.transfers, indices, strict=True):
            started.append(time.monotonic_ns())
            handle = self._agent.make_prepped_xfer(
                "WRITE", local, sources, remote, targets, notif_msg=one.key.encode()
            )
            self._agent.transfer(handle)
            self._posted.append(handle)
        return started

    def _indices(self, batch: Batch, index: int) -> tuple[Any, Any]:
        case, one = self._case, batch.transfers[index]
        assert case is not None
        if self._kind == ONE:
            numbers = [piece(case, batch, index, side) for side in ("sources", "targets")]
            return np.array(numbers[:1], np.int32), np.array(numbers[1:], np.int32)
        layers = np.arange(case.num_layers, dtype=np.int32)[:, None] * np.int32(case.num_blocks)
        return (layers + one.sources).ravel(), (layers + one.targets).ravel()

    def drain(self) -> None:
        """Poll until all are done: NIXL's UCX backend sends the notification from within this call."""
        until = time.monotonic() + _WAIT_S
        while self._posted:
            left = []
            for handle in self._posted:
                state = self._agent.check_xfer_state(handle)
                if state == "PROC":
                    left.append(handle)
                elif state != "DONE":
                    raise TransportError(f"NIXL: a transfer ended in state {state}")
                else:
                    self._ops = int(self._agent.get_xfer_telemetry(handle).descCount)
                    self._agent.release_xfer_handle(handle)
            self._posted = left
            if time.monotonic() > until:
                raise TransportError(f"NIXL: a transfer was not done after {_WAIT_S:.0f} s")

    def wait(self, batch: Batch) -> tuple[list[int], list[int]]:
        keys = [one.key.encode() for one in batch.transfers]
        until = time.monotonic() + _WAIT_S
        sleeps = self.mode.endswith(SLEEP)
        while not all(key in self._arrived for key in keys):
            found = self._agent.get_new_notifs()
            now = time.monotonic_ns()
            for messages in found.values():
                for message in messages:
                    self._arrived[message] = now
            if sleeps and not found:
                time.sleep(_SLEEP_S)
            if time.monotonic() > until:
                raise TransportError(f"NIXL: no notification for {_WAIT_S:.0f} s")
        return [self._arrived.pop(key) for key in keys], []

    def spans(self, batches: Sequence[Batch]) -> Spans:
        assert self._case is not None
        return (block_spans if self._kind == PER_BLOCK else piece_spans)(self._case, batches)

    def network_ops(self) -> int:
        return self._ops

    def _release_lists(self) -> None:
        for ours, theirs in self._sides.values():
            self._agent.release_dlist_handle(ours)
            self._agent.release_dlist_handle(theirs)
        self._sides.clear()

    @property
    def _kind(self) -> str:
        return self.mode.split("/")[0]


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)

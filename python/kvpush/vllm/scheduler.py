"""The scheduler half: decides what is pushed and received, tells the workers once per step.

All methods run on the engine core's thread. Nothing here blocks, raises for a request's sake, or
talks to another process; the side channel has its own threads.
"""

import time
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvpush.vllm import params as rp
from kvpush.vllm.layout import GroupPlan, plan_groups
from kvpush.vllm.metadata import (
    Advance,
    BlockIds,
    Close,
    Fetch,
    Intent,
    KVPushMetadata,
    NewPush,
    WorkerAddress,
)
from kvpush.vllm.metrics import KVPushStats
from kvpush.vllm.side_channel import Directory, SideChannel, side_channel_address

logger = init_logger("vllm." + __name__)

STALL_SECONDS = 5.0
"""P: with blocks held by finished pushes and nothing schedulable for this long, the oldest is evicted."""
MAX_WAITS = 200
"""P: consecutive allocation failures for which vLLM waits for running packs before it preempts."""


@dataclass
class PushState:
    """P: one request whose KV is pushed."""

    request: Any
    leg: rp.Leg
    sent: list[int]
    finished: bool = False
    advanced: bool = False


@dataclass
class LoadState:
    """D: one request that wants KV. phase: ``new`` (claimed, not tried), ``loading`` or ``over``."""

    request: Any
    leg: rp.Leg | None
    digest: bytes
    error: str | None = None
    phase: str = "new"


class PushScheduler:
    """Scheduler half of :class:`kvpush.vllm.KVPushConnector`."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._config = vllm_config
        transfer = vllm_config.kv_transfer_config
        self._produces = bool(transfer.is_kv_producer)
        self._consumes = bool(transfer.is_kv_consumer)
        self._engine_id = str(transfer.engine_id)
        self._fail_policy = transfer.kv_load_failure_policy == "fail"
        self._kv_cache_config = kv_cache_config
        self._groups: list[GroupPlan] = plan_groups(kv_cache_config)
        self._tp_size = int(vllm_config.parallel_config.tensor_parallel_size)
        self._pp_size = int(vllm_config.parallel_config.pipeline_parallel_size)
        self._host, self._port = side_channel_address(vllm_config)
        self._meta = KVPushMetadata()
        self._pushes: dict[str, PushState] = {}
        self._loads: dict[str, LoadState] = {}
        self._push_keys: dict[str, str] = {}
        self._load_keys: dict[str, str] = {}
        self._delayed: set[str] = set()
        self._waits = 0
        self._stalled_since: float | None = None
        self._side_channel: SideChannel | None = None
        self.stats = KVPushStats()

    # ---- requests come -------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Read a new request's parameters, once; claim or open its key."""
        params = request.kv_transfer_params
        if not params:
            return
        if not isinstance(params, dict):
            self._skip(request, "bad_params", f"kv_transfer_params is {type(params).__name__}, not an object")
            return
        for name, allowed, act in (
            ("do_remote_decode", self._produces, self._new_push),
            ("do_remote_prefill", self._consumes, self._new_load),
        ):
            try:
                wanted = rp.flag(params, name)
            except rp.BadParamsError as error:
                self._skip(request, "bad_params", str(error))
                continue
            if wanted and not allowed:
                role = self._config.kv_transfer_config.kv_role
                self._skip(request, "wrong_role", f"{name} is set, but this engine's kv_role is {role}")
            elif wanted:
                act(request, params)

    def _new_push(self, request: Any, params: dict[str, Any]) -> None:
        req_id = request.request_id
        try:
            leg = rp.parse_prefill_leg(params, req_id)
        except rp.BadParamsError as error:
            self._skip(request, "bad_params", str(error))
            return
        owner = self._push_keys.get(leg.key)
        if owner is not None:
            self._skip(request, "duplicate_key", f"request {owner} is pushing key {leg.key!r} already")
            return
        try:
            digest = rp.request_digest(request)
        except rp.BadParamsError as error:
            self._skip(request, "no_digest", str(error))
            # Opened and failed at once: whoever claims the key hears of it instead of waiting.
            self._meta.pushes.append(NewPush(req_id, leg.key, b"\0" * 32, str(error)))
            return
        self._pushes[req_id] = PushState(request, leg, [0] * len(self._groups))
        self._push_keys[leg.key] = req_id
        self._meta.pushes.append(NewPush(req_id, leg.key, digest))

    def _new_load(self, request: Any, params: dict[str, Any]) -> None:
        req_id = request.request_id
        try:
            leg = rp.parse_decode_leg(params, req_id, self._tp_size, self._pp_size)
            digest = rp.request_digest(request)
        except rp.BadParamsError as error:
            self._skip(request, "bad_params", str(error))
            # With policy "fail" a load is promised and failed, so that the request ends with an error.
            self._loads[req_id] = LoadState(request, None, b"", str(error))
            return
        owner = self._load_keys.get(leg.key)
        if owner is not None:
            self._skip(request, "sibling", f"request {owner} receives key {leg.key!r}")
            return
        assert leg.remote is not None
        self._loads[req_id] = LoadState(request, leg, digest)
        self._load_keys[leg.key] = req_id
        self._meta.intents.append(Intent(req_id, leg.key, leg.remote))

    def _skip(self, request: Any, reason: str, text: str) -> None:
        self.stats.label("skipped", reason)
        log = logger.info if reason == "sibling" else logger.warning
        log("kvpush: no transfer for request %s (%s): %s", request.request_id, reason, text)

    # ---- D: loads ------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens a load would bring beyond the local hits. No side effects."""
        load = self._loads.get(request.request_id)
        if load is None or load.phase != "new":
            return 0, False
        if load.error is not None and not self._fail_policy:
            return 0, False
        if any(num_computed_tokens % group.block_size for group in self._groups):
            return 0, False
        count = int(request.num_prompt_tokens) - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Commit point: a positive count starts the receive, zero withdraws the claim. Acts once."""
        load = self._loads.get(request.request_id)
        if load is None or load.phase != "new":
            return
        if num_external_tokens <= 0:
            self._end_load(request.request_id, load, cancel=True)
            if load.error is None:
                self._skip(
                    request, "nothing_to_load", "its blocks are here, or its prompt must be computed here"
                )
            return
        load.phase = "loading"
        local = int(request.num_prompt_tokens) - num_external_tokens
        ids = self._kv_cache_config.select_transfer_block_ids(blocks.get_block_ids())
        first, wanted = self._slice(ids, local, int(request.num_prompt_tokens))
        self._meta.fetches.append(
            Fetch(
                request.request_id,
                load.leg.key if load.leg else "",
                load.leg.remote if load.leg else None,
                load.digest,
                first,
                wanted,
                load.error,
            )
        )

    def _slice(self, ids: Any, start_token: int, end_token: int) -> tuple[list[int], BlockIds]:
        """Copy the ids of the blocks from ``start_token`` up to ``end_token`` (rounded up)."""
        first = [start_token // group.block_size for group in self._groups]
        parts = [
            group.holes(list(table[begin : -(-end_token // group.block_size)]))
            for group, table, begin in zip(self._groups, ids, first, strict=True)
        ]
        return first, tuple(parts)

    def _end_load(self, req_id: str, load: LoadState, cancel: bool) -> None:
        load.phase = "over"
        if load.leg is not None:
            if self._load_keys.get(load.leg.key) == req_id:
                del self._load_keys[load.leg.key]
            if cancel:
                self._meta.cancels.append(req_id)

    # ---- every step ----------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> KVPushMetadata:
        """Return this step's orders; called for every step, also for those without tokens."""
        meta, self._meta = self._meta, KVPushMetadata()
        for req_id in scheduler_output.preempted_req_ids or ():
            push = self._pushes.get(req_id)
            if push is not None and push.advanced:
                push.sent = [0] * len(self._groups)
                push.finished = False
                meta.retracts.append(req_id)
        if self._pushes:
            self._advance(meta, scheduler_output)
        self._watch_stall(meta, scheduler_output)
        return meta

    def _advance(self, meta: KVPushMetadata, scheduler_output: Any) -> None:
        scheduled = scheduler_output.num_scheduled_tokens
        for req_id, push in self._pushes.items():
            count = 0 if push.finished else scheduled.get(req_id, 0)
            if not count:
                continue
            prompt = int(push.request.num_prompt_tokens)
            ready = min(int(push.request.num_computed_tokens) + count, prompt)
            tables = scheduler_output.kv_connector_block_state.get_block_ids(req_id)
            if tables is None:
                continue
            tables = self._kv_cache_config.select_transfer_block_ids(tables)
            done = ready == prompt
            first, parts = list(push.sent), []
            for g, (group, table) in enumerate(zip(self._groups, tables, strict=True)):
                if done:
                    end = -(-prompt // group.block_size)
                elif group.windowed:
                    # vLLM frees and reuses these while the prompt is computed: only its last step is safe.
                    end = push.sent[g]
                else:
                    end = ready // group.block_size
                parts.append(group.holes(list(table[push.sent[g] : end])))
                push.sent[g] = max(end, push.sent[g])
            if done or any(parts):
                push.advanced = True
                push.finished = done
                meta.advances.append(Advance(req_id, first, tuple(parts), done))

    def _watch_stall(self, meta: KVPushMetadata, scheduler_output: Any) -> None:
        waiting = any(not push.advanced for push in self._pushes.values())
        if scheduler_output.total_num_scheduled_tokens or not self._delayed or not waiting:
            self._stalled_since = None
            return
        now = time.monotonic()
        if self._stalled_since is None:
            self._stalled_since = now
        elif now - self._stalled_since >= STALL_SECONDS:
            self._stalled_since = now
            meta.evict += 1
            logger.warning("kvpush: out of blocks; giving up the oldest finished push that nobody has opened")

    def has_pending_block_frees(self) -> bool:
        """Whether pushes may free blocks soon: vLLM then waits a little instead of preempting."""
        if not self._delayed or self._waits >= MAX_WAITS:
            return False
        self._waits += 1
        return True

    # ---- requests go ---------------------------------------------------------------------------

    def update_connector_output(self, output: Any) -> None:
        """Take note of what the workers reported."""
        for req_id in output.finished_sending or ():
            self._delayed.discard(req_id)
            self._waits = 0
        for req_id in output.finished_recving or ():
            load = self._loads.get(req_id)
            if load is not None and load.phase == "loading":
                self._end_load(req_id, load, cancel=False)

    def request_finished(self, request: Any, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """Take note of an end. True: its blocks stay until its id comes in finished_sending."""
        req_id = request.request_id
        load = self._loads.pop(req_id, None)
        if load is not None and load.phase != "over":
            self._end_load(req_id, load, cancel=True)
        push = self._pushes.pop(req_id, None)
        if push is None:
            return False, None
        self._push_keys.pop(push.leg.key, None)
        normal = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        complete = normal and push.finished
        abort = None if complete else f"request ended as {getattr(request.status, 'name', request.status)}"
        self._meta.closes.append(Close(req_id, push.advanced, abort))
        if not push.advanced:
            return False, None
        self._delayed.add(req_id)
        return True, self._response(request, push, block_ids) if complete else None

    def _response(self, request: Any, push: PushState, block_ids: BlockIds) -> dict[str, Any]:
        response: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": tuple(list(ids) for ids in block_ids),
            "remote_engine_id": self._engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self._host,
            "remote_port": self._port,
            "tp_size": self._tp_size,
            "dcp_size": int(self._config.parallel_config.decode_context_parallel_size),
            "pp_size": self._pp_size,
            "remote_num_tokens": int(request.num_computed_tokens),
            "transfer_mode": "push",
        }
        if push.leg.transfer_id is not None:
            response["transfer_id"] = push.leg.transfer_id
        return response

    # ---- life ----------------------------------------------------------------------------------

    def set_workers(self, addresses: list[WorkerAddress]) -> None:
        """Open the side channel; it answers where the workers are.

        Raises
        ------
        OSError
            Host or port cannot be bound; the message names both and the setting.
        """
        if not self._produces or not addresses or self._side_channel is not None:
            return
        workers = [(a.rank, a.host, a.port, a.hello) for a in addresses]
        directory = Directory(self._engine_id, self._tp_size, self._pp_size, workers)
        self._side_channel = SideChannel(self._host, self._port, directory.answer, name="kvpush-directory")
        logger.info("kvpush: side channel at %s:%d", self._host, self._port)

    def shutdown(self) -> None:
        """Close the side channel. May be called twice."""
        if self._side_channel is not None:
            self._side_channel.close()
            self._side_channel = None

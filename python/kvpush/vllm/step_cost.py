"""What the connector costs the engine's Python thread per step, for ``kvpush bench engine``.

Both halves of a prefill engine over a real transfer engine, called in the order in which vLLM's V1 runner
calls them, with the metadata pickled between them as between vLLM's processes. No model and no peer: every
request is scheduled in every step and hands out one block per step.
"""

import logging
import pickle
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.v1.request import RequestStatus

from kvpush.vllm import layout
from kvpush.vllm.scheduler import PushScheduler
from kvpush.vllm.worker import PushWorker

BLOCK_TOKENS = 16
STEPS_PER_REQUEST = 20
_LAYERS = 4


@dataclass
class Costs:
    """Seconds per call, for all requests of the step together; `new` and `finished` per request."""

    steps: list[float] = field(default_factory=list)
    idle_steps: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)


@dataclass(eq=False)
class _Request:
    """The fields of vLLM's Request that the connector reads."""

    request_id: str
    kv_transfer_params: dict[str, Any]
    prompt_token_ids: list[int]
    blocks: tuple[list[int], ...]
    prompt_embeds: Any = None
    mm_features: tuple[Any, ...] = ()
    lora_request: Any = None
    cache_salt: str | None = None
    resumable: bool = False
    num_computed_tokens: int = 0
    status: Any = RequestStatus.FINISHED_LENGTH_CAPPED

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


def measure(num_requests: int, repeats: int) -> Costs:
    """Run ``repeats`` waves of ``num_requests`` prompts of 20 blocks, a block per step."""
    logging.getLogger("vllm.kvpush").setLevel(
        logging.ERROR
    )  # nobody claims these pushes: one warning for each
    costs = Costs()
    halves = _Halves(num_requests * STEPS_PER_REQUEST)
    try:
        for wave in range(repeats + 1):
            measured = costs if wave else Costs()  # the first warms up
            requests = [halves.request(wave, i) for i in range(num_requests)]
            for request in requests:
                measured.new.append(_timed(halves.scheduler.on_new_request, request))
            for _ in range(STEPS_PER_REQUEST):
                measured.steps.append(halves.step(requests))
            measured.idle_steps += [halves.step([]) for _ in range(STEPS_PER_REQUEST)]
            for request in requests:
                measured.finished.append(_timed(halves.scheduler.request_finished, request, request.blocks))
            halves.step([])
            halves.give_up()
    finally:
        halves.close()
    return costs


class _Halves:
    """Scheduler and worker half of one prefill engine with ``num_blocks`` blocks."""

    def __init__(self, num_blocks: int) -> None:
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        names = [f"layers.{i}" for i in range(_LAYERS)]
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=2, dtype=torch.float32)
        kv = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
        )
        config = _vllm_config()
        self.scheduler = PushScheduler(config, kv)
        self.worker = PushWorker(config, kv)
        self._num_blocks = num_blocks
        backends = layout._backends
        layout._backends = lambda vllm_config: "bench"  # there is no model to ask
        try:
            self.worker.register_kv_caches(
                {name: torch.zeros(num_blocks, 1, BLOCK_TOKENS, 4) for name in names}
            )
        finally:
            layout._backends = backends

    def request(self, wave: int, index: int) -> _Request:
        first = index * STEPS_PER_REQUEST
        return _Request(
            f"bench{wave}.{index}-0123abcd",
            {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"bench{wave}.{index}"},
            list(range(STEPS_PER_REQUEST * BLOCK_TOKENS)),
            (list(range(first, first + STEPS_PER_REQUEST)),),
        )

    def step(self, requests: list[_Request]) -> float:
        """Return the seconds that the connector's calls of one step took."""
        tables = {request.request_id: request.blocks for request in requests}
        output = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(tables, BLOCK_TOKENS),
            total_num_scheduled_tokens=BLOCK_TOKENS * len(requests),
            preempted_req_ids=None,
            kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
        )
        started = time.perf_counter()
        meta = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))
        self.worker.handle_preemptions(meta)
        self.worker.wait_for_save(meta)
        results = self.worker.get_transfer_results()
        self.scheduler.update_connector_output(results)
        taken = time.perf_counter() - started
        for request in requests:
            request.num_computed_tokens += BLOCK_TOKENS
        return taken

    def give_up(self) -> None:
        """End the pushes that nobody has claimed, so that the next wave finds an empty engine."""
        engine = self.worker._engine
        engine.evict(1 << 20)
        until = time.monotonic() + 30.0
        while engine.stats()["open_pushes"] and time.monotonic() < until:
            self.step([])

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def _timed(call: Any, *args: Any) -> float:
    started = time.perf_counter()
    call(*args)
    return time.perf_counter() - started


def _vllm_config() -> Any:
    sizes = ("tensor_parallel_size", "pipeline_parallel_size")
    contexts = ("decode_context_parallel_size", "prefill_context_parallel_size")
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_role="kv_producer",
            is_kv_producer=True,
            is_kv_consumer=False,
            engine_id="bench",
            kv_load_failure_policy="fail",
            kv_connector_extra_config={"side_channel_host": "127.0.0.1", "unclaimed_timeout_s": 3600.0},
        ),
        parallel_config=SimpleNamespace(
            **dict.fromkeys((*sizes, *contexts), 1), data_parallel_index=0, rank=0
        ),
        model_config=SimpleNamespace(model="bench", dtype="float32", get_head_size=lambda: 2),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        lora_config=None,
        speculative_config=None,
    )

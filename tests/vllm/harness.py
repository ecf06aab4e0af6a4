"""Both connector halves over a FakeEngine, driven in the order in which vLLM's V1 runner calls them."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from kvpush.testing import FakeEngine, FakeNetwork
from kvpush.vllm import layout
from kvpush.vllm.scheduler import PushScheduler
from kvpush.vllm.worker import PushWorker

BLOCK = 4
NUM_BLOCKS = 64
DEADLINE_S = 20.0


def kv_config(windowed: bool = False) -> KVCacheConfig:
    size = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 2, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["layers.0", "layers.1"], FullAttentionSpec(**size))]
    if windowed:
        groups.append(KVCacheGroupSpec(["layers.2"], SlidingWindowSpec(sliding_window=BLOCK, **size)))
    return KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def vllm_config(role: str, policy: str = "fail", port: int = 5600, **parallel: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_role=role,
            is_kv_producer=role in ("kv_producer", "kv_both"),
            is_kv_consumer=role in ("kv_consumer", "kv_both"),
            engine_id=f"engine-{role}",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"side_channel_host": "127.0.0.1", "side_channel_port": port},
        ),
        parallel_config=SimpleNamespace(
            **(
                {
                    "tensor_parallel_size": 1,
                    "pipeline_parallel_size": 1,
                    "decode_context_parallel_size": 1,
                    "prefill_context_parallel_size": 1,
                    "data_parallel_index": 0,
                    "rank": 0,
                }
                | parallel
            )
        ),
        model_config=SimpleNamespace(model="m", dtype="float32", get_head_size=lambda: 2),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        lora_config=None,
        speculative_config=None,
    )


_ids = itertools.count()


@dataclass(eq=False)
class Request:
    """The fields of vLLM's Request that connectors read."""

    prompt_token_ids: list[int] | None
    kv_transfer_params: Any
    request_id: str = ""
    prompt_embeds: Any = None
    mm_features: list[Any] = field(default_factory=list)
    lora_request: Any = None
    cache_salt: str | None = None
    resumable: bool = False
    num_computed_tokens: int = 0
    status: Any = RequestStatus.WAITING
    blocks: tuple[list[int], ...] = ()

    def __post_init__(self) -> None:
        self.request_id = self.request_id or f"req{next(_ids)}-0123abcd"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or self.prompt_embeds)


class Blocks:
    """As KVCacheBlocks."""

    def __init__(self, ids: tuple[list[int], ...]) -> None:
        self.ids = ids

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.ids


class Instance:
    """One engine: a scheduler half, a worker half, a fake transfer engine."""

    def __init__(self, role: str, network: FakeNetwork, windowed: bool = False, **config: Any) -> None:
        self.config = vllm_config(role, **config)
        self.kv = kv_config(windowed)
        self.scheduler = PushScheduler(self.config, self.kv)
        self.auto = True
        self.engines: list[FakeEngine] = []

        def build(spec: Any, extra: Any) -> FakeEngine:
            self.engines.append(FakeEngine(spec, network, auto=self.auto))
            return self.engines[-1]

        self.worker = PushWorker(self.config, self.kv, build)
        names = [name for group in self.kv.kv_cache_groups for name in group.layer_names]
        self.caches = {name: torch.randn(NUM_BLOCKS, 1, BLOCK, 4) for name in names}
        with mock.patch.object(layout, "_backends", return_value="TEST"):
            self.worker.register_kv_caches(self.caches)
        address = self.worker.handshake_metadata()
        self.scheduler.set_workers([address] if address else [])
        self.sent: list[str] = []
        self.received: list[str] = []
        self.failed: list[str] = []

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    @property
    def num_groups(self) -> int:
        return len(self.kv.kv_cache_groups)

    def step(self, scheduled: dict[Request, int] | None = None, preempted: tuple[Request, ...] = ()) -> Any:
        """One engine step: ``scheduled`` maps a request to its number of tokens."""
        scheduled = scheduled or {}
        tables = {request.request_id: request.blocks for request in scheduled}
        output = SimpleNamespace(
            num_scheduled_tokens={request.request_id: n for request, n in scheduled.items()},
            total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids={request.request_id for request in preempted} or None,
            kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
        )
        meta = self.scheduler.build_connector_meta(output)
        for request, n in scheduled.items():
            request.num_computed_tokens += n
        self.worker.handle_preemptions(meta)
        self.worker.wait_for_save(meta)
        results = self.worker.get_transfer_results()
        self.scheduler.update_connector_output(results)
        assert results.failed_recving <= results.finished_recving
        for seen, new in (
            (self.sent, results.finished_sending),
            (self.received, results.finished_recving),
            (self.failed, results.failed_recving),
        ):
            assert not set(seen) & new, "reported twice"
            seen.extend(new)
        return meta

    def step_until(self, condition: Callable[[], bool]) -> None:
        """Empty steps until the condition holds (hand-shakes run in the background)."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "condition never held"
            self.step()

    def finish(self, request: Request, status: Any = RequestStatus.FINISHED_LENGTH_CAPPED) -> Any:
        request.status = status
        return self.scheduler.request_finished(request, request.blocks)

    def abort(self, request: Request) -> Any:
        return self.finish(request, RequestStatus.FINISHED_ABORTED)

    def reopen(self) -> None:
        with mock.patch.object(layout, "_backends", return_value="TEST"):
            self.worker.reopen_engine()

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


class Pair:
    """P and D on one fake network."""

    def __init__(self, port: int, windowed: bool = False, policy: str = "fail") -> None:
        self.network = FakeNetwork()
        self.port = port
        self.p = Instance("kv_producer", self.network, windowed, port=port)
        self.d = Instance("kv_consumer", self.network, windowed, port=port, policy=policy)

    def p_params(self, **more: Any) -> dict[str, Any]:
        return {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, **more}

    def d_params(self, **more: Any) -> dict[str, Any]:
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": "engine-kv_producer",
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "tp_size": 1,
            "pp_size": 1,
            "remote_request_id": "unused",
            **more,
        }

    def p_request(self, tokens: list[int], key: str, blocks: tuple[list[int], ...], **more: Any) -> Request:
        request = Request(tokens, self.p_params(transfer_id=key), blocks=blocks, **more)
        self.p.scheduler.on_new_request(request)
        return request

    def d_request(self, tokens: list[int], key: str, blocks: tuple[list[int], ...], **more: Any) -> Request:
        request = Request(tokens, self.d_params(transfer_id=key), blocks=blocks, **more)
        self.d.scheduler.on_new_request(request)
        return request

    def load(self, request: Request, local_tokens: int = 0) -> int:
        """D admits the request: match, allocate; returns the promised tokens."""
        count, is_async = self.d.scheduler.get_num_new_matched_tokens(request, local_tokens)
        assert is_async == (count > 0)
        self.d.scheduler.update_state_after_alloc(request, Blocks(request.blocks), count)
        return count

    def close(self) -> None:
        self.d.close()
        self.p.close()


def tokens(n: int, seed: int = 0) -> list[int]:
    return [seed * 1000 + i for i in range(n)]


def connect(pair: Pair) -> None:
    """Establish D's session, so that later steps need no waiting."""
    request = pair.d_request(tokens(4, 99), "warm-up", ([60],))
    pair.d.step()
    pair.d.step_until(lambda: bool(pair.d.engine.called("expect")))
    pair.d.abort(request)
    pair.d.step()
    pair.d.engine.calls.clear()


def equal(pair: Pair, source: list[int], target: list[int], layers: tuple[str, ...] | None = None) -> bool:
    return all(
        torch.equal(pair.p.caches[name][a], pair.d.caches[name][b])
        for name in layers or pair.p.caches
        for a, b in zip(source, target, strict=True)
    )

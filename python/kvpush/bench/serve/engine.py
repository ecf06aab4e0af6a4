"""One vLLM engine as a process: ``python -m kvpush.bench.serve.engine SETTINGS`` (a JSON object).

Orders come as JSON lines on stdin, answers leave as JSON lines on stdout; the end of stdin ends it.
The engine core runs in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) and its loop is the one of
vLLM's own core process: it steps while the scheduler has requests, pauses 1 ms after a step that ran no
model, and sleeps in its queue otherwise. All times are seconds of ``CLOCK_MONOTONIC``.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import queue
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

_PAUSE_S = 0.001  # vLLM's own, v1/engine/core.py
_PROGRESS_DELAY_US = 1000
_PR_SET_PDEATHSIG = 1

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def lend_nixl(slow_progress: bool) -> None:
    """Let vLLM's ``import nixl`` find the wheel ``nixl-cu13`` where the front package is not installed.

    ``slow_progress`` gives each agent's progress thread a pause; NIXL's Python layer sets none.

    Raises
    ------
    ImportError
        Neither package is installed.
    """
    name = "nixl" if importlib.util.find_spec("nixl") else "nixl_cu13"
    for module in ("", "._api", "._bindings"):
        sys.modules[f"nixl{module}"] = importlib.import_module(name + module)
    if slow_progress:
        bindings: Any = sys.modules["nixl._bindings"]
        agent = bindings.nixlAgent

        def paused(name: str, config: Any) -> Any:
            config.pthrDelay = _PROGRESS_DELAY_US
            return agent(name, config)

        bindings.nixlAgent = paused


@dataclass
class _Leg:
    """One request under way: when each token came, and when the step of the first one began."""

    times: list[float] = field(default_factory=list)
    began: float = 0.0


class Engine:
    """One in-process ``LLMEngine`` and what the benchmark must see of it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import EngineArgs, LLMEngine
        from vllm.config import KVTransferConfig

        engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=settings["model"],
                kv_transfer_config=KVTransferConfig(**settings["transfer"]),
                skip_tokenizer_init=True,
                dtype="float32",
                block_size=settings["block_tokens"],
                max_model_len=settings["max_tokens"],
                max_num_batched_tokens=settings["chunk_tokens"],
                max_num_seqs=4,
                enforce_eager=True,
                enable_prefix_caching=False,
                disable_log_stats=True,
                async_scheduling=False,
                num_gpu_blocks_override=settings["num_blocks"],
            )
        )
        self._engine = engine
        self._core = engine.engine_core.engine_core
        self.scheduler = self._core.scheduler
        self._legs: dict[str, _Leg] = {}
        self._prompts: dict[str, list[int]] = {}
        self._computed = 0
        self._executed = False
        self._stats: dict[str, Any] = {}
        self._watch()

    def _watch(self) -> None:
        """Count what the scheduler computes and keep every statistic that the connector hands out."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        step, schedule, stats = self._core.step_fn, self.scheduler.schedule, connector.get_kv_connector_stats

        def stepped() -> Any:
            outputs, self._executed = step()
            return outputs, self._executed

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._computed += output.total_num_scheduled_tokens
            return output

        def kept() -> Any:
            latest = stats()
            if latest is not None:
                _add(self._stats, latest.data)
            return latest

        self._core.step_fn, self.scheduler.schedule = stepped, scheduled
        connector.get_kv_connector_stats = kept

    # ---- orders --------------------------------------------------------------------------------

    def prompts(self, prompts: dict[str, list[int]]) -> dict[str, Any]:
        """Keep prompts by name: a request's order stays small, whatever its length."""
        self._prompts |= prompts
        return {}

    def request(self, name: str, prompt: str, max_tokens: int, params: dict[str, Any] | None) -> None:
        """Add a request; its answer leaves with its last token."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        self._legs[name] = _Leg()
        self._engine.add_request(name, {"prompt_token_ids": self._prompts[prompt]}, sampling)

    def settle(self, order: str, seed: int) -> dict[str, Any]:
        """Put the free list in order for the next request and hand out the statistics so far."""
        from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

        pool = self.scheduler.kv_cache_manager.block_pool
        free = pool.free_block_queue.get_all_free_blocks()
        free.sort(key=lambda block: block.block_id)
        if order == "shuffled":  # block tables are scattered, as after hours of serving
            random.Random(seed).shuffle(free)
        pool.free_block_queue = FreeKVCacheBlockQueue(free)
        stats, self._stats = self._stats, {}
        computed, self._computed = self._computed, 0
        return {"used_blocks": pool.num_gpu_blocks - 1 - len(free), "computed": computed, "stats": stats}

    # ---- the loop ------------------------------------------------------------------------------

    def step(self) -> list[dict[str, Any]]:
        """Run one step as vLLM's core process does; returns the answers of requests that ended."""
        began = time.monotonic()
        outputs = self._engine.step()
        now = time.monotonic()
        answers = []
        for output in outputs:
            leg = self._legs[output.request_id]
            tokens = output.outputs[0].token_ids
            leg.began = leg.began or began
            leg.times += [now] * (len(tokens) - len(leg.times))
            if output.finished:
                del self._legs[output.request_id]
                answers.append(
                    {
                        "tokens": list(tokens),
                        "began": leg.began,
                        "times": leg.times,
                        "reason": output.outputs[0].finish_reason,
                        "params": output.kv_transfer_params,
                    }
                )
        return answers

    def close(self) -> None:
        """Shut the engine core and its connector down."""
        self._engine.engine_core.shutdown()

    def pause(self) -> None:
        """Leave the processor to background threads where vLLM does."""
        if not self._executed and self.scheduler.has_requests():
            time.sleep(_PAUSE_S)


def _add(total: dict[str, Any], delta: dict[str, Any]) -> None:
    """Sum counters, join lists, and do the same in labelled counters."""
    for name, value in delta.items():
        if isinstance(value, dict):
            _add(total.setdefault(name, {}), value)
        elif isinstance(value, list):
            total[name] = total.get(name, []) + value
        else:
            total[name] = total.get(name, 0) + value


def main(settings: dict[str, Any]) -> None:
    """Serve orders until stdin ends."""
    # A driver that is killed must not leave stopped processes behind.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # What vLLM prints must not mix with the answers.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ |= ENVIRONMENT | {"OMP_NUM_THREADS": str(len(settings["cores"]))}
    os.environ |= {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": settings["host"],
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(settings["port"]),
    }
    os.sched_setaffinity(0, settings["cores"])
    if settings["transfer"]["kv_connector"] == "KVPushConnector":
        import kvpush.vllm

        kvpush.vllm.register()
    else:
        lend_nixl(settings["slow_progress"])
    engine = Engine(settings)
    if settings["slow_progress"]:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), settings["cores"])
    orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(orders,), daemon=True).start()
    print(json.dumps({"ready": True}), file=out)
    _serve(engine, orders, out)
    engine.close()


def _read(orders: "queue.SimpleQueue[dict[str, Any] | None]") -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    orders.put(None)


def _serve(engine: Engine, orders: "queue.SimpleQueue[dict[str, Any] | None]", out: Any) -> None:
    waiting: list[dict[str, Any]] = []  # "settle" is answered when no request is open
    while True:
        busy = engine.scheduler.has_requests()
        if not busy and waiting:
            print(json.dumps(engine.settle(**waiting.pop())), file=out)
            continue
        if not busy or not orders.empty():
            order = orders.get()
            if order is None:
                return
            what = order.pop("do")
            if what == "settle":
                waiting.append(order)
            elif what == "prompts":
                print(json.dumps(engine.prompts(**order)), file=out)
            else:
                engine.request(**order)
            continue
        for answer in engine.step():
            print(json.dumps(answer), file=out)
        engine.pause()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    os._exit(0)  # the engine's threads may hang about; nothing is left to be said

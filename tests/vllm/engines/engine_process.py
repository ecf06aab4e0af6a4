"""vLLM engines that a test drives step by step, kills and starts again.

``python engine_process.py`` is a nursery: it imports vLLM once and forks an engine for each line on stdin,
so that an engine is there in a second or two. An engine takes its orders over a Unix socket, one JSON object
per line, each answered by one. ``nodes.py`` is the other end.
"""

import contextlib
import json
import os
import queue
import re
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny

CHUNK = 128
GAUGES = ("open_pushes", "open_claims", "open_receives", "leases_in_use", "quarantined_bytes")


def nursery() -> None:
    tiny.set_environment()
    import vllm.v1.engine.core
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import kvpush.vllm

    kvpush.vllm.register()
    # Ended engines need no waiting for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        spec = json.loads(line)
        pid = os.fork()
        if not pid:
            status = 1
            try:
                _child(spec)
                status = 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
    os._exit(0)  # the interpreter's own end takes seconds


def _child(spec: dict[str, Any]) -> None:
    from kvpush import testing
    from kvpush.vllm import handshake, scheduler

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= spec["env"] | {"KVPUSH_TRACE_FILE": spec["trace"]}
    handshake.ASK_SECONDS = scheduler.STALL_SECONDS = 2.0
    wire = socket.socket(socket.AF_UNIX)
    wire.connect(spec["socket"])
    try:
        with testing.faults(**spec["faults"]) if spec["faults"] else contextlib.nullcontext():
            engine = tiny.TinyEngine(spec["model"], spec["transfer"], CHUNK, **spec["options"])
        Server(engine, wire).run()
    except BaseException:
        import traceback

        traceback.print_exc()
        raise


class Server:
    """Steps its engine while there is something to do, and carries out orders between steps."""

    def __init__(self, engine: tiny.TinyEngine, wire: socket.socket) -> None:
        self.engine = engine
        self.scheduler = engine.scheduler
        self.paused = False
        self.done: dict[str, Any] = {}
        self.held: list[Any] = []
        self.wanted: list[str] | None = None
        self.preemptions = 0
        self.zeroed: list[int] = []
        self.wire = wire
        self.orders: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._read, args=(wire.makefile("r"),), daemon=True).start()
        preempt = self.scheduler._preempt_request

        def count(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = count

    def _read(self, lines: Any) -> None:
        with contextlib.suppress(OSError):
            for line in lines:
                self.orders.put(json.loads(line))
        self.orders.put(None)

    def run(self) -> None:
        self._answer(os.getpid())
        while True:
            busy = not self.paused and self.scheduler.has_requests()
            # With nothing to compute, wait a little between steps, as vLLM's own loop does.
            wait_s = 0.0 if self.scheduler.running else 0.001
            try:
                order = self.orders.get(timeout=wait_s if busy else None)
            except queue.Empty:
                self.step(1)
                self._answer_wait()
                continue
            if order is None:
                break
            name, args = order
            if name == "wait":
                self.wanted = args[0]
                self._answer_wait()
            else:
                self._answer(getattr(self, name)(*args))
        self.engine.close()

    def _answer(self, value: Any) -> None:
        self.wire.sendall((json.dumps(value) + "\n").encode())

    def _answer_wait(self) -> None:
        if self.wanted is not None and all(name in self.done for name in self.wanted):
            wanted, self.wanted = self.wanted, None
            self._answer({name: self.done.pop(name) for name in wanted})

    # The orders.

    def add(
        self, name: str, ids: list[int], max_tokens: int, params: Any, more: dict[str, Any] | None = None
    ) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # The likeliest token, in a way that allows several completions.
        sampling = SamplingParams(
            temperature=1.0,
            top_k=1,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=None if params is None else {"kv_transfer_params": params},
            **(more or {}),
        )
        self.engine.engine.add_request(name, {"prompt_token_ids": ids}, sampling)

    def abort(self, names: list[str]) -> None:
        self.engine.engine.abort_request(names)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def step(self, count: int) -> None:
        for _ in range(count):
            for name, out in self.engine.step().items():
                self.done[name] = {
                    "tokens": [list(one.token_ids) for one in out.outputs],
                    "reason": out.outputs[0].finish_reason,
                    "params": out.kv_transfer_params,
                }

    def preempt(self, name: str) -> None:
        (request,) = (one for one in self.scheduler.running if one.request_id.startswith(name + "-"))
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)

    def hold(self, leave: int) -> None:
        """Take blocks out of the cache so that ``leave`` are left; -1 gives all back."""
        pool = self.scheduler.kv_cache_manager.block_pool
        pool.free_blocks(self.held)
        self.held = [] if leave < 0 else pool.get_new_blocks(pool.get_num_free_blocks() - leave)

    def zero(self, on: bool) -> None:
        """Zero every newly allocated block before the step's forward, as vLLM does for mixed precisions."""
        self.scheduler.needs_kv_cache_zeroing = on
        for manager in self.scheduler.kv_cache_manager.coordinator.single_type_managers:
            manager._record_new_block_ids = on
        runner = self.engine.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

        def zero(ids: list[int]) -> None:
            self.zeroed += ids
            type(runner)._zero_block_ids(runner, ids)

        runner._zero_block_ids = zero

    def take_zeroed(self) -> list[int]:
        """Blocks that were zeroed since the last call."""
        zeroed, self.zeroed = self.zeroed, []
        return zeroed

    def blocks(self, name: str) -> list[int]:
        """The blocks of an open request."""
        (full,) = (one for one in self.scheduler.requests if one.startswith(name + "-"))
        return list(self.scheduler.kv_cache_manager.get_block_ids(full)[0])

    def forget(self) -> bool:
        """Drop the prefix cache."""
        return bool(self.engine.engine.reset_prefix_cache())

    def policy(self, name: str) -> None:
        self.scheduler.recompute_kv_load_failures = name == "recompute"
        self.scheduler.connector.scheduler_half._fail_policy = name == "fail"

    def state(self) -> dict[str, Any]:
        requests = {
            re.sub("-[0-9a-f]{8}$", "", name): {
                "status": request.status.name,
                "computed": request.num_computed_tokens,
                "outputs": request.num_output_tokens,
            }
            for name, request in self.scheduler.requests.items()
        }
        state: dict[str, Any] = {
            "requests": requests,
            "used_blocks": self.engine.used_blocks - len(self.held),
            "preemptions": self.preemptions,
        }
        if self.scheduler.connector is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            half = self.scheduler.connector.scheduler_half
            worker = get_kv_transfer_group().worker_half
            stats = worker._engine.stats()
            state["stats"] = stats
            state["open"] = {
                name: len(getattr(half, name))
                for name in ("_pushes", "_loads", "_delayed", "_push_keys", "_load_keys")
            } | {
                "loads": len(worker._loads._by_id) + len(worker._loads._by_handle),
                "pushes": len(worker._pushes._by_id) + len(worker._pushes._by_handle),
                "parked": sum(map(len, worker._loads._parked.values())) + len(worker._loads._full),
                "gauges": sum(worker._gauges),
            }
            state["open"] |= {name: stats[name] for name in GAUGES}
        return state


if __name__ == "__main__":
    nursery()

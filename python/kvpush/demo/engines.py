"""The demo's command lines: one prefill engine, one decode engine, one router."""

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvpush.demo.servers import Server, Servers, free_ports
from kvpush.doctor.host import connector_registered

BLOCK_TOKENS = 32  # the smallest that vLLM's CPU attention takes
MAX_BATCHED_TOKENS = 256  # small, so that the long prompt is prefilled in several steps
DTYPE = "float32"  # on CPUs without AMX some 5 times faster than bfloat16, and free of rounding ties
MODEL_NAME = "kvpush-demo"
P_ENGINE_ID = "demo-prefill"
D_ENGINE_ID = "demo-decode"

_OVER = re.compile(r"kvpush: (?:engine \S+|session \S+ with \S+) over (\w+)")


@dataclass(frozen=True)
class Deployment:
    """The running servers and the files that they write."""

    prefill: Server
    decode: Server
    router: Server
    prefill_trace: Path
    decode_trace: Path
    router_trace: Path


@dataclass(frozen=True)
class Ports:
    """One port each; ``*_kv`` are the side channels of the connectors."""

    prefill: int
    decode: int
    router: int
    prefill_kv: int
    decode_kv: int

    @classmethod
    def choose(cls) -> "Ports":
        """Return ports that are free now."""
        return cls(*free_ports(5))


def engine_argv(model: Path, port: int, kv_transfer_config: Mapping[str, object]) -> list[str]:
    """Return the command line of one vLLM server."""
    # The module, not the `vllm` script: the script of the CPU distribution does not start.
    return [
        sys.executable,
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model)),
        *("--served-model-name", MODEL_NAME),
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
        *("--dtype", DTYPE),
        "--enforce-eager",
        *("--block-size", str(BLOCK_TOKENS)),
        *("--max-model-len", "2048"),
        *("--max-num-seqs", "8"),
        *("--max-num-batched-tokens", str(MAX_BATCHED_TOKENS)),
        *("--kv-transfer-config", json.dumps(kv_transfer_config)),
    ]


def kv_transfer_config(
    role: str, engine_id: str, transport: str, side_channel_port: int
) -> dict[str, object]:
    """Return vLLM's ``--kv-transfer-config`` for one engine; ``role`` is vLLM's kv_role."""
    # An installed wheel registers the name; a source tree on PYTHONPATH, or a VLLM_PLUGINS, does not.
    by_path = {} if connector_registered() else {"kv_connector_module_path": "kvpush.vllm"}
    return {
        **by_path,
        "kv_connector": "KVPushConnector",
        "kv_role": role,
        "engine_id": engine_id,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "transport": transport,
            "side_channel_host": "127.0.0.1",
            "side_channel_port": side_channel_port,
        },
    }


def engine_env(cores: list[int], trace: Path) -> dict[str, str]:
    """Return the environment of one CPU engine that computes on ``cores``."""
    listed = ",".join(str(core) for core in cores)
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the prompts need a few ten MiB
        "VLLM_CPU_OMP_THREADS_BIND": listed,
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "KVPUSH_TRACE_FILE": str(trace),
    }


def split_cores() -> tuple[list[int], list[int]]:
    """Share the cores between the two engines; a single core serves both."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    return (cores[:half] or cores, cores[half:])


def start_engines(servers: Servers, model: Path, transport: str, ports: Ports, logs: Path) -> list[Server]:
    """Start P and D, in this order, without waiting for them."""
    started = []
    for name, role, engine_id, port, kv_port, cores in zip(
        ("prefill", "decode"),
        ("kv_producer", "kv_consumer"),
        (P_ENGINE_ID, D_ENGINE_ID),
        (ports.prefill, ports.decode),
        (ports.prefill_kv, ports.decode_kv),
        split_cores(),
        strict=True,
    ):
        config = kv_transfer_config(role, engine_id, transport, kv_port)
        argv = engine_argv(model, port, config)
        env = engine_env(cores, logs / f"{name}.trace.jsonl")
        url = f"http://127.0.0.1:{port}"
        started.append(servers.start(name, argv, env, logs / f"{name}.log", url))
    return started


def start_router(servers: Servers, ports: Ports, logs: Path) -> Server:
    """Start the router in front of the two engines, without waiting for it."""
    argv = [
        sys.executable,
        *("-m", "kvpush", "router"),
        *(
            "--prefill",
            f"http://127.0.0.1:{ports.prefill},kv=127.0.0.1:{ports.prefill_kv},id={P_ENGINE_ID}",
        ),
        *("--decode", f"http://127.0.0.1:{ports.decode}"),
        *("--host", "127.0.0.1"),
        *("--port", str(ports.router)),
        *("--trace-file", str(logs / "router.trace.jsonl")),
    ]
    return servers.start("router", argv, {}, logs / "router.log", f"http://127.0.0.1:{ports.router}")


def transport_in_use(log: Path, requested: str) -> str:
    """Return the transport that an engine says in its log its last session is over."""
    found = _OVER.findall(log.read_text(errors="replace"))
    return str(found[-1]) if found else requested

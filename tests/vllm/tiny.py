"""A tiny random Llama on disk and in-process vLLM engines over it: token ids in, token ids out."""

import os
import random
import socket
from pathlib import Path
from typing import Any

BLOCK_SIZE = 32
VOCAB = 512
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def set_environment() -> None:
    """What vLLM must find before it is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def make_model(folder: Path, heads: int = 2, layers: int = 3) -> str:
    """Write a random Llama with lively weights; the same seed gives the same model."""
    if not (folder / "config.json").exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(7)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=32,
            max_position_embeddings=2048,
            initializer_range=0.3,
            tie_word_embeddings=False,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def prompt(length: int, seed: int) -> list[int]:
    """A prompt of random token ids; a longer one of the same seed begins with it."""
    return random.Random(seed).choices(range(5, VOCAB - 5), k=length)


class TinyEngine:
    """One in-process ``LLMEngine``."""

    def __init__(
        self,
        model: str,
        kv_transfer: dict[str, Any] | None = None,
        max_tokens_per_step: int = 2048,
        **more: Any,
    ) -> None:
        from vllm import EngineArgs, LLMEngine

        if kv_transfer is not None:
            from vllm.config import KVTransferConfig

            more["kv_transfer_config"] = KVTransferConfig(**kv_transfer)
        options: dict[str, Any] = {
            "model": model,
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            "max_model_len": 1024,
            "max_num_batched_tokens": max_tokens_per_step,
            "max_num_seqs": 16,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "async_scheduling": False,
            "num_gpu_blocks_override": 256,
        }
        self.engine = LLMEngine.from_engine_args(EngineArgs(**(options | more)))

    def add(
        self, req_id: str, ids: list[int], max_tokens: int, transfer: dict[str, Any] | None = None
    ) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if transfer is None else {"kv_transfer_params": transfer},
        )
        self.engine.add_request(req_id, {"prompt_token_ids": ids}, sampling)

    def step(self) -> dict[str, Any]:
        """One step; finished outputs by request id."""
        return {out.request_id: out for out in self.engine.step() if out.finished}

    def run(self) -> dict[str, Any]:
        """Step until no request is open; outputs by request id."""
        done: dict[str, Any] = {}
        while self.engine.has_unfinished_requests():
            done |= self.step()
        return done

    def generate(self, ids: list[int], max_tokens: int = 8) -> list[int]:
        """Greedy tokens of one prompt, with no transfer."""
        self.add("plain", ids, max_tokens)
        return list(self.run()["plain"].outputs[0].token_ids)

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    def idle_steps(self, limit: int = 10_000) -> None:
        """Step until delayed frees and queued reports are through."""
        core = self.engine.engine_core.engine_core
        for _ in range(limit):
            if not core.scheduler.has_requests():
                return
            self.engine.step()
        raise AssertionError("requests stay open")

    @property
    def used_blocks(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def close(self) -> None:
        self.engine.engine_core.shutdown()

"""What is measured: one case per combination of sizes, and the shapes of real models."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvpush.errors import InvalidArgument

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
VLLM_BLOCK_TOKENS = 16
# A small case repeats its batch within one round until so many bytes have moved.
_ROUND_BYTES = 8 * MIB
_MAX_BATCHES = 20
_IDLE_BATCHES = 5
_TABLES = 8  # distinct block tables, where the cache may be that large
_CACHE_BYTES = 512 * MIB


@dataclass(frozen=True)
class ModelShape:
    """KV of one tensor-parallel rank: bytes of one block in one layer, and layers."""

    num_layers: int
    bytes_per_token: int  # one layer, K and V, this rank

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of 16 tokens in one layer."""
        return VLLM_BLOCK_TOKENS * self.bytes_per_token


def _attention(kv_heads: int, head_dim: int, tp: int) -> int:
    return 2 * (kv_heads // tp) * head_dim * 2  # K and V, two bytes per element


# From the models' config.json: num_hidden_layers, num_key_value_heads, head_dim; 16-bit KV.
MODEL_SHAPES = {
    "llama-70b-tp8": ModelShape(80, _attention(kv_heads=8, head_dim=128, tp=8)),  # 8 KiB blocks
    "qwen3-32b-tp4": ModelShape(64, _attention(kv_heads=8, head_dim=128, tp=4)),  # 16 KiB
    # MLA: one latent of kv_lora_rank 512 + qk_rope_head_dim 64, the same on every rank.
    "deepseek-v3": ModelShape(61, (512 + 64) * 2),  # 18 KiB
    "smollm2": ModelShape(30, _attention(kv_heads=3, head_dim=64, tp=1)),  # 135M: 12 KiB
}


@dataclass(frozen=True)
class Case:
    """One row per arm: `concurrency` transfers at once, each of `total_bytes` out of a cache.

    `run_blocks` is how many neighbouring blocks follow each other on both sides: 1 fully scattered, 0 all.
    `idle_ms` None: throughput. Else one transfer at a time, so long after the one before.
    """

    block_bytes: int
    run_blocks: int
    num_layers: int
    total_bytes: int
    concurrency: int = 1
    idle_ms: float | None = None
    cache_bytes: int = 0  # of one side
    model_shape: str = ""

    @property
    def num_positions(self) -> int:
        """Blocks of one transfer in each layer."""
        return self.total_bytes // (self.num_layers * self.block_bytes)

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache in each layer."""
        return self.cache_bytes // (self.num_layers * self.block_bytes)

    @property
    def batch_bytes(self) -> int:
        """Bytes of the transfers that run at once."""
        return self.total_bytes * self.concurrency

    @property
    def num_batches(self) -> int:
        """Batches of one round, one after another. D asks for all of them before: each has its own table."""
        if self.idle_ms is not None:
            wanted = _IDLE_BATCHES if self.idle_ms else _MAX_BATCHES
        else:
            wanted = min(_MAX_BATCHES, max(1, _ROUND_BYTES // self.batch_bytes))
        return min(wanted, self.num_tables)

    @property
    def num_tables(self) -> int:
        """Block tables without a block in common, each for what moves at once."""
        return max(1, self.num_blocks // (self.num_positions * self.concurrency))

    @property
    def label(self) -> str:
        """For a person, in one line."""
        run = {0: "contiguous", 1: "scattered"}.get(self.run_blocks, f"runs of {self.run_blocks}")
        text = (
            f"{size(self.total_bytes)}, {self.num_layers} layers, blocks of {size(self.block_bytes)}, {run}"
        )
        if self.concurrency > 1:
            text += f", {self.concurrency} at once"
        if self.idle_ms is not None:
            text += f", after {self.idle_ms:g} ms idle" if self.idle_ms else ", in a stream"
        return text

    def fitted(self) -> "Case":
        """Return the case with whole blocks only.

        Raises
        ------
        InvalidArgument
            Less than one block in each layer.
        """
        step = self.num_layers * self.block_bytes
        if self.total_bytes < step:
            raise InvalidArgument(
                f"total_bytes={self.total_bytes} is less than one block in each layer: {self.num_layers} "
                f"layers x {self.block_bytes} bytes = {step}"
            )
        return replace(self, total_bytes=self.total_bytes // step * step)


def sweep(
    block_bytes: Sequence[int],
    run_blocks: Sequence[int],
    num_layers: Sequence[int],
    total_bytes: Sequence[int],
    concurrency: Sequence[int],
    idle_ms: Sequence[float],
    model_shape: str = "",
) -> list[Case]:
    """Return every combination, those of one cache geometry next to each other.

    With `idle_ms`, one transfer at a time at each of these; `concurrency` must be 1.

    Raises
    ------
    InvalidArgument
        A size is out of its limits; the message has the option and the limits.
    """
    _check("block-bytes", block_bytes, KIB, MIB)
    _check("run-blocks", run_blocks, 0, 1 << 20)
    _check("num-layers", num_layers, 1, 128)
    _check("total-bytes", total_bytes, 4 * KIB, GIB)
    _check("concurrency", concurrency, 1, 64)
    _check("idle-ms", idle_ms, 0, 10_000)
    if any(size % 64 for size in block_bytes):
        raise InvalidArgument(f"--block-bytes {list(block_bytes)}: expected multiples of 64")
    if idle_ms and list(concurrency) != [1]:
        raise InvalidArgument("--idle-ms measures one transfer at a time: --concurrency must be 1")
    idles: Sequence[float | None] = idle_ms or [None]
    combinations = itertools.product(block_bytes, num_layers, total_bytes, concurrency, run_blocks, idles)
    return [
        Case(block, run, layers, total, at_once, idle, model_shape=model_shape).fitted()
        for block, layers, total, at_once, run, idle in combinations
    ]


def default_sweep(quick: bool) -> list[Case]:
    """Return the cases of a run without sizes: one axis at a time around 4 KiB blocks, 64 MiB."""
    if quick:
        return [
            *sweep([4 * KIB], [0, 1], [16], [16 * MIB], [1], []),
            *sweep([64 * KIB], [1], [16], [16 * MIB], [1], []),
            *sweep([4 * KIB], [1], [4], [64 * KIB], [1], [0, 20]),
        ]
    return [
        *sweep([4 * KIB], [0, 1, 2, 4, 16], [16], [64 * MIB], [1], []),
        *sweep([KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB], [1], [16], [64 * MIB], [1], []),
        *sweep([4 * KIB], [1], [16], [MIB], [1, 8, 64], []),
        *sweep([4 * KIB], [1], [4], [64 * KIB], [1], [0, 50]),
    ]


def with_cache(cases: Sequence[Case], cache_bytes: int) -> list[Case]:
    """Return the cases over one size of cache, `cache_bytes`, or if that is 0 one that suits them all.

    That is eight times what the largest moves at once, but no more than 512 MiB unless it must.

    Raises
    ------
    InvalidArgument
        `cache_bytes` is less than what one case moves at once.
    """
    batch = max(case.batch_bytes for case in cases)
    wanted = cache_bytes or max(batch, min(_CACHE_BYTES, max(_TABLES * batch, 32 * MIB)))
    if wanted < batch:
        raise InvalidArgument(f"--cache-bytes {wanted} is less than the {batch} bytes that move at once")
    return [replace(case, cache_bytes=wanted) for case in cases]


def parse_sizes(option: str, text: str) -> list[int]:
    """Return the sizes of a list such as ``"4096,16KiB,1MiB"``.

    Raises
    ------
    InvalidArgument
        A part is no size.
    """
    units = {"KIB": KIB, "MIB": MIB, "GIB": GIB}
    sizes = []
    for part in text.split(","):
        number = part.strip().upper()
        unit = next((name for name in units if number.endswith(name)), "")
        try:
            sizes.append(int(number.removesuffix(unit)) * units.get(unit, 1))
        except ValueError:
            raise InvalidArgument(
                f"--{option} {text!r}: expected numbers such as 4096 or 1MiB, separated by commas"
            ) from None
    return sizes


def size(num_bytes: int) -> str:
    """Return bytes for a person: 65536 as 64 KiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} B"


def _check(option: str, values: Sequence[float], low: float, high: float) -> None:
    for value in values:
        if not low <= value <= high:
            raise InvalidArgument(f"--{option} {value:g}: expected {low:g} to {high:g}")

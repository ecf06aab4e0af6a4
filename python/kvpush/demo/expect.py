"""How many bytes of KV a request must move: counted from the model's config and the token ids alone.

Nothing here asks kvpush, so that a wrong count there cannot agree with itself.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class KvShape:
    """The KV cache of a plain attention model: K and V of every layer, head and token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    block_tokens: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        per_token = self.num_layers * self.num_kv_heads * self.head_dim * 2 * self.dtype_bytes
        return per_token * self.block_tokens


def kv_shape(model: Path, dtype: str, block_tokens: int) -> KvShape:
    """Read the shape from a checkpoint's ``config.json``.

    Raises
    ------
    ValueError
        Not a model whose layers all have ordinary full attention.
    """
    config = json.loads((model / "config.json").read_text())
    kinds = set(config.get("layer_types") or ["full_attention"])
    if "kv_lora_rank" in config or "num_attention_heads" not in config or kinds != {"full_attention"}:
        raise ValueError(
            f"{model}: kvpush demo counts the bytes of models with full attention in every layer; "
            f"this one has model_type {config.get('model_type')!r}"
        )
    num_heads = int(config["num_attention_heads"])
    return KvShape(
        num_layers=int(config["num_hidden_layers"]),
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // num_heads),
        dtype_bytes=_DTYPE_BYTES[dtype],
        block_tokens=block_tokens,
    )


class DecodeCache:
    """What D's prefix cache holds, by the rules of vLLM: full blocks of the requests that it has finished."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._sequences: list[tuple[int, ...]] = []

    def add(self, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Record a finished request. The KV of its last token was never computed."""
        self._sequences.append((*prompt, *generated[:-1]))

    def num_blocks_hit(self, prompt: Sequence[int]) -> int:
        """Return how many leading blocks of ``prompt`` D has. Its last token is always computed anew."""
        usable = (len(prompt) - 1) // self._block_tokens
        longest = max((_common_prefix(prompt, known) for known in self._sequences), default=0)
        return min(usable, longest // self._block_tokens)

    def num_blocks_missing(self, prompt: Sequence[int]) -> int:
        """Return how many blocks P has to push for ``prompt``, its last partly filled one included."""
        return -(-len(prompt) // self._block_tokens) - self.num_blocks_hit(prompt)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count

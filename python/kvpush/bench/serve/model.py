"""KV-heavy models of little compute: random Llamas with a narrow hidden state and many KV heads or layers."""

from dataclasses import dataclass
from pathlib import Path

VOCAB = 512
HIDDEN = 64
_DTYPE_BYTES = 4  # float32


@dataclass(frozen=True)
class Shape:
    """A model's KV cache and the block size that it is served with."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int

    @property
    def token_bytes(self) -> int:
        """Bytes of KV per token, all layers."""
        return self.num_layers * self.num_kv_heads * self.head_dim * 2 * _DTYPE_BYTES

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block of one layer: what a per-block transfer moves as one descriptor at least."""
        return self.token_bytes * self.block_tokens // self.num_layers

    def num_blocks(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_tokens)


# The same bytes per token and the same attention work, in 1 MiB or in 32 KiB pieces. 32 tokens is the
# smallest block of vLLM's CPU attention.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("few-large", num_layers=8, num_kv_heads=8, head_dim=128, block_tokens=128),
        Shape("many-small", num_layers=64, num_kv_heads=1, head_dim=128, block_tokens=32),
    )
}


def write_model(shape: Shape, folder: Path) -> Path:
    """Write the checkpoint; the same shape gives the same weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_kv_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=1 << 14,
        # Large, so that every token depends on the whole prompt: KV that is wrong changes the text.
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def prompt(length: int, seed: int) -> list[int]:
    """Return a prompt of random-looking token ids."""
    return [(seed * 7919 + i * 104729 + i * i * 31) % (VOCAB - 10) + 5 for i in range(length)]

"""No Python on the data path: how often the connector calls the transfer engine for one request."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import BLOCK, NUM_BLOCKS, Instance, Pair, connect, tokens
from tiny import free_port
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvpush.testing import FakeEngine

PER_STEP = {"poll", "stats"}


class CountedEngine(FakeEngine):
    """Counts every call into the engine and its handles, but for those that make a session."""

    def poll(self, timeout: float = 0.0) -> list[Any]:
        self.note("poll")
        return super().poll(timeout)

    def stats(self) -> dict[str, Any]:
        self.note("stats")
        return super().stats()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a connected pair over a cache of so many layers; their engines count their calls."""
    monkeypatch.setattr("harness.FakeEngine", CountedEngine)
    made = []

    def make(layers: int) -> Pair:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=2, dtype=torch.float32)
        group = KVCacheGroupSpec([f"layers.{i}" for i in range(layers)], spec)
        config = KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group])
        monkeypatch.setattr("harness.kv_config", lambda windowed: config)
        pair = Pair(free_port())
        made.append(pair)
        connect(pair)
        return pair

    yield make
    for pair in made:
        pair.close()


def take_calls(instance: Instance) -> Counter[str]:
    calls = Counter(call[0] for call in instance.engine.calls)
    instance.engine.calls.clear()
    return calls


def calls_of_one_request(pair: Pair, blocks: int, chunk: int, idle_steps: int) -> tuple[Any, Any]:
    """P's and D's calls for one prompt, by name; ``idle_steps`` more steps pass before P begins."""
    take_calls(pair.p), take_calls(pair.d)
    prompt = tokens(blocks * BLOCK)
    d = pair.d_request(prompt, "k", (list(range(30, 30 + blocks)),))
    pair.load(d)
    for _ in range(idle_steps):
        pair.d.step()
        pair.p.step()
    p = pair.p_request(prompt, "k", (list(range(1, 1 + blocks)),))
    while p.num_computed_tokens < len(prompt):
        pair.p.step({p: min(chunk, len(prompt) - p.num_computed_tokens)})
    pair.p.finish(p)
    pair.d.step_until(lambda: pair.d.received == [d.request_id])
    assert not pair.d.failed
    pair.p.step_until(lambda: pair.p.sent == [p.request_id])
    pair.d.finish(d)
    pair.d.step()
    return take_calls(pair.p), take_calls(pair.d)


@pytest.mark.parametrize("layers", [1, 60])
@pytest.mark.parametrize("blocks", [1, 28])
@pytest.mark.parametrize("idle_steps", [0, 50])
def test_calls_per_request_do_not_depend_on_blocks_layers_or_steps_of_others(
    counted: Any, layers: int, blocks: int, idle_steps: int
) -> None:
    p, d = calls_of_one_request(counted(layers), blocks, 1000, idle_steps)
    assert {name: count for name, count in p.items() if name not in PER_STEP} == {
        "push": 1,
        "advance": 1,
        "finish": 1,
    }
    assert {name: count for name, count in d.items() if name not in PER_STEP} == {"expect": 1, "receive": 1}
    # Events bring one look at the statistics for the whole step.
    assert p["stats"] <= 1
    assert d["stats"] <= 1


def test_a_step_polls_once_whatever_is_in_flight(counted: Any) -> None:
    pair = counted(2)
    for i in range(20):
        pair.load(pair.d_request(tokens(BLOCK, i), f"k{i}", ([20 + i],)))
    pair.d.step()
    take_calls(pair.d)
    for _ in range(5):
        pair.d.step()
    assert take_calls(pair.d) == {"poll": 5}


@pytest.mark.parametrize("chunk", [BLOCK, 2 * BLOCK, 7 * BLOCK])
def test_prefill_hands_out_blocks_once_per_step_of_its_prompt(counted: Any, chunk: int) -> None:
    p, d = calls_of_one_request(counted(2), 28, chunk, 0)
    assert p["advance"] == 28 * BLOCK // chunk
    assert (p["push"], p["finish"], d["expect"], d["receive"]) == (1, 1, 1, 1)

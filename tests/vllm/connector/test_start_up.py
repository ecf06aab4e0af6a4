"""What is refused at start-up."""

import pytest
import torch
from harness import BLOCK, Instance
from tiny import free_port

from kvpush.testing import FakeNetwork
from kvpush.vllm import layout


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_parallel_sizes_are_refused(name: str) -> None:
    from harness import vllm_config

    with pytest.raises(layout.UnsupportedSetupError, match=f"{name} = 1, got 2"):
        layout.check_parallelism(vllm_config("kv_both", **{name: 2}))


def test_case_c9_kernel_blocks_are_refused_with_both_values() -> None:
    instance = Instance("kv_producer", FakeNetwork(), port=free_port())
    try:
        caches = {name: torch.zeros(128, 1, BLOCK, 4) for name in instance.caches}
        with pytest.raises(layout.UnsupportedSetupError, match="128 kernel blocks for 64 cache blocks"):
            layout.describe(instance.config, instance.kv, caches)
    finally:
        instance.close()


def test_shared_layers_are_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_backends", lambda _: "TEST")
    instance = Instance("kv_producer", FakeNetwork(), port=free_port())
    try:
        one = torch.zeros(64, 1, BLOCK, 4)
        spec = layout.describe(instance.config, instance.kv, {"layers.0": one, "layers.1": one})
        assert [plane.name for plane in spec.groups[0].planes] == ["layers.0"]
        assert spec.groups[0].unit_bytes == BLOCK * 4 * 4
    finally:
        instance.close()


def test_mamba_is_refused() -> None:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

    spec = MambaSpec(block_size=4, shapes=((2, 2),), dtypes=(torch.float32,))
    with pytest.raises(layout.UnsupportedSetupError, match="MambaSpec"):
        layout.plan_groups(KVCacheConfig(64, [], [KVCacheGroupSpec(["m"], spec)]))

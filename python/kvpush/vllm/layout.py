"""What vLLM's KV cache looks like to the engine: groups, planes, fingerprint, and what is refused."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger
from vllm.v1 import kv_cache_interface as kvi

logger = init_logger("vllm." + __name__)

_FULL = ("FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec")
_WINDOWED = ("SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec")


@dataclass(frozen=True)
class GroupPlan:
    """One transfer group. ``windowed``: vLLM frees its blocks before the request ends."""

    block_size: int
    windowed: bool
    layer_names: tuple[str, ...]

    def holes(self, ids: list[int]) -> list[int]:
        """Block ids with vLLM's null block (id 0, of windowed groups only) as -1."""
        return [block or -1 for block in ids] if self.windowed else ids


@dataclass(frozen=True)
class PlaneSpec:
    """One layer's KV: an array ``[B, H, N, C]``, its global layer name and range of KV heads."""

    name: str
    array: Any
    head_range: tuple[int, int]


@dataclass(frozen=True)
class GroupSpec:
    """The planes that share one block table; ``unit_bytes`` is one block of all of them."""

    block_size: int
    planes: list[PlaneSpec]
    unit_bytes: int


@dataclass(frozen=True)
class CacheSpec:
    """All that a transfer engine is built from."""

    groups: list[GroupSpec]
    fingerprint: dict[str, str] = field(default_factory=dict)


class UnsupportedSetupError(ValueError):
    """The engine's configuration cannot be served; raised at start-up, names the values."""


def check_parallelism(vllm_config: Any) -> None:
    """Refuse topologies that are not supported.

    Raises
    ------
    UnsupportedSetupError
        A parallel size is not 1; the message names it.
    """
    parallel = vllm_config.parallel_config
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        value = int(getattr(parallel, name, 1) or 1)
        if value != 1:
            raise UnsupportedSetupError(
                f"kvpush needs {name} = 1, got {value}: run one engine per GPU for now"
            )


def plan_groups(kv_cache_config: Any) -> list[GroupPlan]:
    """Return the transfer groups of vLLM's KV cache configuration, in the order of block tables.

    Raises
    ------
    UnsupportedSetupError
        A group holds something other than plain, full or windowed attention.
    """
    if getattr(kv_cache_config, "has_mixed_precision_kv_cache", False):
        raise UnsupportedSetupError(
            "kvpush cannot transfer a KV cache of mixed precisions: use one --kv-cache-dtype"
        )
    plans = []
    for number, group in enumerate(kv_cache_config.transfer_groups):
        spec = group.kv_cache_spec
        inner = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
        kinds = {_kind(one, number) for one in inner}
        if len(kinds) != 1:
            raise UnsupportedSetupError(f"kvpush: KV cache group {number} mixes full and windowed attention")
        if len({one.block_size for one in inner}) != 1:
            sizes = sorted({one.block_size for one in inner})
            raise UnsupportedSetupError(f"kvpush: KV cache group {number} mixes block sizes {sizes}")
        modes = {getattr(one, "kv_quant_mode", None) for one in inner}
        dtypes = {str(getattr(one, "dtype", "")) for one in inner}
        if len(modes) > 1 or len(dtypes) > 1:
            raise UnsupportedSetupError(
                f"kvpush: KV cache group {number} mixes precisions {sorted(dtypes)} {sorted(map(str, modes))}"
            )
        plans.append(GroupPlan(int(inner[0].block_size), kinds.pop(), tuple(group.layer_names)))
    if not plans:
        raise UnsupportedSetupError("kvpush: this model has no KV cache group to transfer")
    return plans


def _kind(spec: Any, number: int) -> bool:
    name = type(spec).__name__
    if name not in _FULL and name not in _WINDOWED:
        raise UnsupportedSetupError(
            f"kvpush cannot transfer KV cache group {number}: {name}; supported are "
            f"{', '.join(_FULL + _WINDOWED)}"
        )
    if getattr(spec, "prefix_replay_tokens", 0) or getattr(spec, "tokens_per_state", 1) != 1:
        raise UnsupportedSetupError(
            f"kvpush cannot transfer KV cache group {number}: compressed or replayed {name}"
        )
    return isinstance(spec, kvi.SlidingWindowSpec | kvi.ChunkedLocalAttentionSpec)


def describe(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> CacheSpec:
    """Turn the registered tensors into planes; shared layers appear once.

    Raises
    ------
    UnsupportedSetupError
        Shapes that cannot be transferred; the message names both values.
    """
    groups = []
    for number, plan in enumerate(plan_groups(kv_cache_config)):
        planes: list[PlaneSpec] = []
        seen: set[int] = set()
        unit_bytes = 0
        for name in plan.layer_names:
            if name not in kv_caches:
                continue  # the layer uses another one's cache
            view = _view(name, kv_caches[name], plan, int(kv_cache_config.num_blocks))
            if view.data_ptr() in seen:
                continue
            seen.add(view.data_ptr())
            unit_bytes += int(view[0].numel()) * int(view.element_size())
            planes.append(PlaneSpec(name, view, (0, int(view.shape[1]))))
        if not planes:
            raise UnsupportedSetupError(f"kvpush: no tensor was registered for KV cache group {number}")
        groups.append(GroupSpec(plan.block_size, planes, unit_bytes))
    return CacheSpec(groups, fingerprint(vllm_config, [group.block_size for group in groups]))


def _view(name: str, tensor: Any, plan: GroupPlan, num_blocks: int) -> Any:
    if not hasattr(tensor, "data_ptr") or tensor.dim() not in (3, 4):
        shape = tuple(getattr(tensor, "shape", ()))
        raise UnsupportedSetupError(
            f"kvpush: KV cache of layer {name} has shape {shape}, expected [blocks, heads, tokens, content]"
        )
    view = tensor if tensor.dim() == 4 else tensor.unsqueeze(1)
    if int(view.shape[0]) != num_blocks:
        raise UnsupportedSetupError(
            f"kvpush: layer {name} has {view.shape[0]} kernel blocks for {num_blocks} cache blocks: set "
            f"--block-size to the attention kernel's block size so that both are equal"
        )
    if int(view.shape[2]) != plan.block_size:
        raise UnsupportedSetupError(
            f"kvpush: layer {name} holds {view.shape[2]} tokens per block, its group {plan.block_size}"
        )
    return view


def fingerprint(vllm_config: Any, block_sizes: list[int]) -> dict[str, str]:
    """Return what both sides must agree on, field by field; a mismatch is refused by name and value."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    overrides = {
        "hf_overrides": getattr(model, "hf_overrides", None),
        "rope": getattr(model, "rope_parameters", None),
        "max_loras": None if vllm_config.lora_config is None else "lora",
    }
    text = json.dumps(overrides, sort_keys=True, default=repr)
    speculative = vllm_config.speculative_config
    return {
        "model": str(model.model),
        "revision": str(getattr(model, "revision", None)),
        "quantization": str(getattr(model, "quantization", None)),
        "overrides": hashlib.sha256(text.encode()).hexdigest()[:16],
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "block_size": ",".join(map(str, block_sizes)),
        "content": f"head_size {model.get_head_size()}, {_backends(vllm_config)}",
        "speculative": "none"
        if speculative is None
        else f"{speculative.method}:{getattr(speculative.draft_model_config, 'model', None)}",
    }


def _backends(vllm_config: Any) -> str:
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    return "+".join(sorted({backend.get_name() for backend in get_current_attn_backends(vllm_config)}))


def engine_options(extra_config: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Return the entries of ``kv_connector_extra_config`` that configure the engine; warn of the rest."""
    ours = {"side_channel_host", "side_channel_port"}
    unknown = sorted(set(extra_config) - known - ours)
    if unknown:
        logger.warning(
            "kvpush: kv_connector_extra_config keys that mean nothing here: %s", ", ".join(unknown)
        )
    return {key: value for key, value in extra_config.items() if key in known}


def build_engine(spec: CacheSpec, extra_config: Mapping[str, Any]) -> Any:
    """Build the transfer engine over vLLM's tensors (``KVPUSH_*`` variables, then ``extra_config``)."""
    import dataclasses

    import kvpush

    # The secret comes from the environment only: vLLM logs extra_config.
    known = {f.name for f in dataclasses.fields(kvpush.Config)} - {"secret"}
    config = kvpush.Config.from_env(**engine_options(extra_config, known))
    groups = [
        kvpush.Group(
            block_size=group.block_size,
            planes=[
                kvpush.Plane.from_array(plane.array, name=plane.name, head_range=plane.head_range)
                for plane in group.planes
            ],
        )
        for group in spec.groups
    ]
    return kvpush.Engine(kvpush.Cache(groups, fingerprint=spec.fingerprint), config)

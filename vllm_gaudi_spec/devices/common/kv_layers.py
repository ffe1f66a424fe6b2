"""vLLM's plan of the KV cache, layer by layer: for devices that keep keys and values in tensors of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs

from vllm_gaudi_spec.config import UnsupportedConfigError

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class KVLayer:
    name: str
    place: int
    """Layers of different groups may have the same: a block belongs to one group at a time, so they share memory."""
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    has_values: bool
    """False where they are a part of the keys."""


def kv_layers(kv_cache_config: KVCacheConfig) -> Iterator[KVLayer]:
    by_place: dict[int, tuple[object, ...]] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        for index, name in enumerate(tensor.layers):
            spec = _spec_of(kv_cache_config, name)
            place = tensor.offset + index * tensor.layer_stride
            kind = (spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype, spec.head_size_v > 0)
            if by_place.setdefault(place, kind) != kind:
                raise UnsupportedConfigError(
                    f"{name} shares KV memory with a layer of another shape; set --disable-hybrid-kv-cache-manager."
                )
            yield KVLayer(name, place, kv_cache_config.num_blocks, *kind)


def _spec_of(kv_cache_config: KVCacheConfig, name: str) -> AttentionSpec:
    spec = next(group.kv_cache_spec for group in kv_cache_config.kv_cache_groups if name in group.layer_names)
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.kv_cache_specs[name]
    if not isinstance(spec, AttentionSpec):
        raise UnsupportedConfigError(f"{name} keeps no attention KV; use a model whose layers are all attention.")
    return spec

"""KV caches stored as two tensors per layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_gaudi_spec.attention import padded, torch_ops
from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec, KVShape
from vllm_gaudi_spec.attention.operations import PLAIN, Operations
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.base import Attention, Graphs, Memory
from vllm_gaudi_spec.upstream.kv_cache import AttentionSpec, UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from vllm_gaudi_spec.upstream.kv_cache import KVCacheConfig, KVCacheLayout

# The number of block copies in each graph. Unused entries copy the padding block to itself.
_COPIES = 8


class KVPair(NamedTuple):
    """A layer's KV cache as separate tensors [slots, K, D] for keys and values. As views of a single tensor, they could
    not be written in a Gaudi graph."""

    keys: torch.Tensor
    values: torch.Tensor | None
    """None if the values are part of the keys."""
    block_size: int

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.keys,) if self.values is None else (self.keys, self.values)

    @property
    def shape(self) -> KVShape:
        num_slots, num_kv_heads, key_size = self.keys.shape
        row_size = key_size + (0 if self.values is None else self.values.shape[-1])
        return KVShape(num_slots // self.block_size, self.block_size, num_kv_heads, row_size, self.keys.dtype)

    def blocks(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return views [blocks, block_size, K, D] for reading."""
        keys, *values = (tensor.unflatten(0, (-1, self.block_size)) for tensor in self.tensors())
        return keys, values[0] if values else None

    def write(
        self,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor | None,
        slots_T: torch.Tensor,
        operations: Operations = PLAIN,
    ) -> None:
        operations.k_cache(key_TKD, self.keys, slots_T)
        if self.values is not None:
            assert value_TKD is not None
            operations.v_cache(value_TKD, self.values, slots_T)


class PairMemory(Memory):
    """Memory for devices that store KV caches as `KVPair`s."""

    def __init__(self, torch_device: torch.device, graphs: Graphs) -> None:
        self.torch_device = torch_device
        self._graphs = graphs

    def bytes_asked(self, error: RuntimeError) -> int | None:
        return 0 if isinstance(error, torch.OutOfMemoryError) else None

    def allocate_kv(self, kv_cache_config: KVCacheConfig, layout: KVCacheLayout) -> dict[str, KVPair]:
        return allocate(kv_cache_config, self.torch_device)

    def make_block_copier(self, kv_caches: dict[str, KVPair]) -> Callable[[list[tuple[int, int]]], None]:
        """Return a function that takes (source, target) pairs of block IDs and copies the blocks with a graph."""
        distinct = list({id(pair.keys): pair for pair in kv_caches.values()}.values())
        copy_blocks = self._graphs.graph(partial(_copy_blocks, distinct))

        def copy(pairs: list[tuple[int, int]]) -> None:
            for first in range(0, len(pairs), _COPIES):
                some = pairs[first : first + _COPIES]
                some += [(0, 0)] * (_COPIES - len(some))
                copy_blocks(self.upload(torch.tensor(some, dtype=torch.int64).T.contiguous()))

        return copy


class PairAttention(Attention):
    """Attention over `KVPair`s in plain torch. Subclasses can use kernels instead."""

    def kv_shape(self, kv_cache: KVPair) -> KVShape:
        return kv_cache.shape

    def write_kv(
        self,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor | None,
        kv_cache: KVPair,
        slots_T: torch.Tensor,
        spec: AttentionLayerSpec,
    ) -> None:
        kv_cache.write(key_TKD, value_TKD, slots_T, spec.operations)

    def attend(
        self, query_THD: torch.Tensor, kv_cache: KVPair, call: AttentionCall, spec: AttentionLayerSpec
    ) -> torch.Tensor:
        if call.packed is not None:  # only on devices that do not capture graphs
            return torch_ops.attend_packed(self.attend, query_THD, kv_cache, call, spec)
        return padded.attend(query_THD, *kv_cache.blocks(), call, spec)


def allocate(kv_cache_config: KVCacheConfig, device: torch.device) -> dict[str, KVPair]:
    """Allocate zeroed caches, keyed by layer name.

    Layers in different KV cache groups may share memory, because each block belongs to only one group at a time.
    """
    by_offset: dict[int, tuple[object, KVPair]] = {}
    by_layer: dict[str, KVPair] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        for index, name in enumerate(tensor.layers):
            spec = _find_spec(kv_cache_config, name)
            has_values = spec.head_size_v > 0
            kind = spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype, has_values
            offset = tensor.offset + index * tensor.layer_stride
            if offset not in by_offset:
                shape = (kv_cache_config.num_blocks * spec.block_size, spec.num_kv_heads, spec.head_size)
                make = partial(torch.zeros, shape, dtype=spec.dtype, device=device)
                by_offset[offset] = kind, KVPair(make(), make() if has_values else None, spec.block_size)
            kind_there, by_layer[name] = by_offset[offset]
            if kind_there != kind:
                raise UnsupportedConfigError(
                    f"{name} shares memory with a layer that has another shape; set --disable-hybrid-kv-cache-manager."
                )
    return by_layer


def _copy_blocks(kv_pairs: list[KVPair], blocks_2N: torch.Tensor) -> None:
    for pair in kv_pairs:
        offset = torch.arange(pair.block_size, device=blocks_2N.device)
        source, target = ((side[:, None] * pair.block_size + offset).flatten() for side in blocks_2N.unbind(0))
        for tensor in pair.tensors():
            tensor.index_copy_(0, target, tensor.index_select(0, source))


def _find_spec(kv_cache_config: KVCacheConfig, name: str) -> AttentionSpec:
    spec = next(group.kv_cache_spec for group in kv_cache_config.kv_cache_groups if name in group.layer_names)
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.kv_cache_specs[name]
    assert isinstance(spec, AttentionSpec), "`LoadedModel.kv_cache_spec` gives no others"
    return spec

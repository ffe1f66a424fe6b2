"""KV as two tensors a layer, for devices with kernels of their own or none: allocation, writes, copies of blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_gaudi_spec.attention.metadata import KVShape
from vllm_gaudi_spec.attention.operations import PLAIN, Operations

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend

# Block copies of one program; what is left over copies the pad block onto itself.
_COPIES = 8


class KVPair(NamedTuple):
    """Keys and values of a layer, a tensor [slots, K, D] each: Gaudi changes tensors as a whole, not through views."""

    keys: torch.Tensor
    values: torch.Tensor | None
    """None where they are a part of the keys."""
    block_size: int

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.keys,) if self.values is None else (self.keys, self.values)

    @property
    def shape(self) -> KVShape:
        num_slots, num_kv_heads, key_size = self.keys.shape
        row_size = key_size + (0 if self.values is None else self.values.shape[-1])
        return KVShape(num_slots // self.block_size, self.block_size, num_kv_heads, row_size, self.keys.dtype)

    def blocks(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """For reading: [blocks, block_size, K, D]."""
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


def allocate(kv_cache_config: KVCacheConfig, device: torch.device) -> dict[str, KVPair]:
    """By layer name; zero."""
    from vllm_gaudi_spec.devices.common.kv_layers import kv_layers

    by_place: dict[int, KVPair] = {}
    by_layer: dict[str, KVPair] = {}
    for layer in kv_layers(kv_cache_config):
        if layer.place not in by_place:
            shape = (layer.num_blocks * layer.block_size, layer.num_kv_heads, layer.head_size)
            make = partial(torch.zeros, shape, dtype=layer.dtype, device=device)
            by_place[layer.place] = KVPair(make(), make() if layer.has_values else None, layer.block_size)
        by_layer[layer.name] = by_place[layer.place]
    return by_layer


def block_copier(kv_pairs: dict[str, KVPair], backend: DeviceBackend) -> Callable[[list[tuple[int, int]]], None]:
    """As `DeviceBackend.block_copier`, by one program."""
    distinct = list({id(pair.keys): pair for pair in kv_pairs.values()}.values())
    program = backend.graph(partial(_copy_blocks, distinct))

    def copy(pairs: list[tuple[int, int]]) -> None:
        for first in range(0, len(pairs), _COPIES):
            some = pairs[first : first + _COPIES]
            some += [(0, 0)] * (_COPIES - len(some))
            program(backend.upload(torch.tensor(some, dtype=torch.int64).T.contiguous()))

    return copy


def _copy_blocks(kv_pairs: list[KVPair], blocks_2N: torch.Tensor) -> None:
    for pair in kv_pairs:
        offset = torch.arange(pair.block_size, device=blocks_2N.device)
        source, target = ((side[:, None] * pair.block_size + offset).flatten() for side in blocks_2N.unbind(0))
        for tensor in pair.tensors():
            tensor.index_copy_(0, target, tensor.index_select(0, source))

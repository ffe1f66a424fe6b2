"""Attention in plain torch, used for layers that a device's kernel does not support and as a reference in tests.

A layer's KV has shape [blocks, K, block_size, 2 * D], as allocated by vLLM. Each head in a block stores its keys first
and then its values. If values are part of the keys, the shape is [blocks, K, block_size, D].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from vllm_gaudi_spec.attention.padded import attend as attend_padded

if TYPE_CHECKING:
    from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec


def split_kv(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the keys and values, each [blocks, K, block_size, D]."""
    num_blocks, num_kv_heads, block_size, double = kv_cache.shape
    halves = kv_cache.view(num_blocks, num_kv_heads, 2, block_size, double // 2)
    return halves[:, :, 0], halves[:, :, 1]


def copy_blocks(kv_caches: dict[str, torch.Tensor], pairs: list[tuple[int, int]]) -> None:
    """Copy the first block in each pair to the second one, in every layer's cache."""
    for kv_cache in kv_caches.values():
        for source, target in pairs:
            kv_cache[target] = kv_cache[source]


def write_kv(
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slots_T: torch.Tensor,
    spec: AttentionLayerSpec,
) -> None:
    keys, values = _split_layer_kv(kv_cache, spec)
    spec.operations.k_cache(key_TKD, _Slots(keys), slots_T)
    if values is not None:
        assert value_TKD is not None
        spec.operations.v_cache(value_TKD, _Slots(values), slots_T)


def attend(
    query_THD: torch.Tensor, kv_cache: torch.Tensor, call: AttentionCall, spec: AttentionLayerSpec
) -> torch.Tensor:
    if call.packed is not None:
        return attend_packed(attend, query_THD, kv_cache, call, spec)
    keys, values = _split_layer_kv(kv_cache, spec)
    values = None if values is None else values.transpose(1, 2)

    def narrow_table() -> AttentionCall:
        num_blocks = -(-(int(call.starts_B.max()) + call.num_queries) // spec.block_size)
        return replace(call, block_table_BW=call.block_table_BW[:, :num_blocks], _plans={})

    needed: AttentionCall = call.plan(("as wide as needed", spec.block_size), narrow_table)
    needed = needed.replace_index(call.index)
    return attend_padded(query_THD, keys.transpose(1, 2), values, needed, spec)


class _Slots:
    """Blocks [blocks, K, block_size, D] that are indexed by slot."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self._blocks = blocks

    def index_copy_(self, dim: int, index: torch.Tensor, source: torch.Tensor) -> None:
        size = self._blocks.shape[2]
        self._blocks[index // size, :, index % size] = source


def attend_packed(
    attend: Callable[..., torch.Tensor],
    query_THD: torch.Tensor,
    kv_cache: Any,
    call: AttentionCall,
    spec: AttentionLayerSpec,
) -> torch.Tensor:
    """Attend from packed tokens with an `attend` function that supports only padded batches."""
    packed = call.packed
    assert packed is not None
    whole: AttentionCall = call.plan("rectangle", lambda: replace(call, packed=None, _plans={}))
    num_positions = call.num_rows * call.num_queries
    query = packed.spread(query_THD, num_positions)
    whole = whole.replace_index(None if call.index is None else call.index.spread(packed, num_positions))
    return attend(query, kv_cache, whole, spec).index_select(0, packed.index_T)


def _split_layer_kv(kv_cache: torch.Tensor, spec: AttentionLayerSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (kv_cache, None) if spec.value_size is not None else split_kv(kv_cache)

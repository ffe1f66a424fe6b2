"""Paged attention in plain torch: serves layers that a device's kernel does not take, and is the tests' oracle.

KV of a layer is [blocks, K, block_size, 2 * D] as vLLM allocates it; a head of a block holds its keys, then its values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec


def split_kv(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of keys and values, each [blocks, K, block_size, D]."""
    num_blocks, num_kv_heads, block_size, double = kv_cache.shape
    halves = kv_cache.view(num_blocks, num_kv_heads, 2, block_size, double // 2)
    return halves[:, :, 0], halves[:, :, 1]


def write_kv(
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    kv_cache: torch.Tensor,
    slots_T: torch.Tensor,
    spec: AttentionLayerSpec,
) -> None:
    keys, values = split_kv(kv_cache)
    block, offset = slots_T // spec.block_size, slots_T % spec.block_size
    keys[block, :, offset] = key_TKD
    values[block, :, offset] = value_TKD


def attend(
    query_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    call: AttentionCall,
    spec: AttentionLayerSpec,
    out_THD: torch.Tensor,
) -> None:
    rows, queries, head_size = call.num_rows, call.num_queries, spec.head_size
    group = spec.num_heads // spec.num_kv_heads
    keys, values = (_gather(half, call.block_table_BW) for half in split_kv(kv_cache))
    query = query_THD.view(rows, queries, spec.num_kv_heads, group, head_size).permute(0, 2, 3, 1, 4)
    scores = (query.float() @ keys.float().unsqueeze(2).transpose(-1, -2)) * spec.scale
    if spec.logits_soft_cap:
        scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
    seen = call.plan(("mask", spec.sliding_window, spec.block_size), lambda: visible(call, spec))
    weights = scores.masked_fill_(~seen[:, None, None], -torch.inf).softmax(-1)
    # [B, K, G, Q, D] -> [B, Q, K, G, D]
    result = (weights @ values.float().unsqueeze(2)).permute(0, 3, 1, 2, 4)
    out_THD.copy_(result.reshape(rows * queries, spec.num_heads, head_size))


def visible(call: AttentionCall, spec: AttentionLayerSpec) -> torch.Tensor:
    """[B, Q, S]: which key positions a query may read."""
    num_keys = call.block_table_BW.shape[1] * spec.block_size
    device = call.starts_B.device
    query_pos = call.starts_B[:, None, None] + torch.arange(call.num_queries, device=device)[None, :, None]
    key_pos = torch.arange(num_keys, device=device)[None, None, :]
    seen = key_pos <= query_pos
    if spec.sliding_window is not None:
        seen = seen & (key_pos > query_pos - spec.sliding_window)
    return seen


def _gather(half: torch.Tensor, block_table_BW: torch.Tensor) -> torch.Tensor:
    """The rows' blocks side by side: [B, K, S, D]."""
    rows, width = block_table_BW.shape
    _, num_kv_heads, block_size, head_size = half.shape
    blocks = half.index_select(0, block_table_BW.flatten())
    blocks = blocks.view(rows, width, num_kv_heads, block_size, head_size).transpose(1, 2)
    return blocks.reshape(rows, num_kv_heads, width * block_size, head_size)

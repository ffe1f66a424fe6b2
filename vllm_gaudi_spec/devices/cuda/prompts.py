"""Attention for prompt chunks, using FlashAttention. Dimensions have the same names as in attention.py.

Rows with consecutive slices of a prompt (`vllm_gaudi_spec.slices`) are joined, so that a tile can span several rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_gaudi_spec.upstream.flash_attention import find_flash_attention

if TYPE_CHECKING:
    from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec
    from vllm_gaudi_spec.devices.common.kv_pair import KVPair

_FEWEST_QUERIES = 32
"""The minimum number of queries per row. It includes all prompt chunks and slices, but no verify steps."""
_FEWEST_LANES = 512 * 32
"""The minimum total number of queries over all rows and heads. With fewer, the GPU is full only if keys are split."""


class Sequences(NamedTuple):
    """B sequences with contiguous queries. If rows were joined, the last sequences are empty."""

    ends_S: torch.Tensor
    """int32 [B + 1]: cumulative query counts, starting at 0."""
    lengths_B: torch.Tensor
    """int32: number of keys in each sequence, including padding in the sequence's last row."""
    block_table_BW: torch.Tensor


def supports(spec: AttentionLayerSpec) -> bool:
    """Whether `attend` supports a layer's prompt chunks. The layer must be causal."""
    return (
        spec.dtype in (torch.bfloat16, torch.float16)
        and spec.kv_dtype is None
        and spec.head_size % 8 == 0
        and spec.head_size <= 256
        and find_flash_attention() is not None
    )


def takes(call: AttentionCall, spec: AttentionLayerSpec) -> bool:
    """Whether `attend` supports a call and is the faster choice for it."""
    has_enough = call.num_rows * call.num_queries * spec.num_heads >= _FEWEST_LANES
    return call.num_queries >= _FEWEST_QUERIES and has_enough and spec.is_causal and supports(spec)


def attend(query_THD: torch.Tensor, kv: KVPair, call: AttentionCall, spec: AttentionLayerSpec) -> torch.Tensor:
    flash_attention = find_flash_attention()
    assert flash_attention is not None, "`takes` was not asked"
    sequences: Sequences = call.plan("sequences", lambda: join_rows(call))
    keys, values = kv.blocks()
    window = -1 if spec.sliding_window is None else spec.sliding_window - 1
    return flash_attention(
        query_THD,
        keys,
        values,
        cu_seqlens_q=sequences.ends_S,
        seqused_k=sequences.lengths_B,
        block_table=sequences.block_table_BW,
        max_seqlen_q=query_THD.shape[0],
        max_seqlen_k=call.block_table_BW.shape[1] * spec.block_size,
        softmax_scale=spec.scale,
        softcap=spec.logits_soft_cap,
        causal=True,
        window_size=[window, -1 if window < 0 else 0],
    )


def join_rows(call: AttentionCall) -> Sequences:
    """Join each row with the preceding one if both have the same KV blocks and it begins where that one ends."""
    queries, num_tokens = call.num_queries, call.num_rows * call.num_queries
    starts_B, table_BW = call.starts_B, call.block_table_BW
    continues = (table_BW[1:] == table_BW[:-1]).all(dim=1) & (starts_B[1:] == starts_B[:-1] + queries)
    begins_B = torch.cat([continues.new_ones(1), ~continues])
    sequence_B = begins_B.cumsum(0) - 1
    # Rows that continue a sequence have no entry of their own, so they write the last entry again.
    first_B = torch.arange(call.num_rows, device=starts_B.device, dtype=torch.int32) * queries
    ends_S = torch.full((call.num_rows + 1,), num_tokens, device=starts_B.device, dtype=torch.int32)
    ends_S.scatter_(
        0,
        torch.where(begins_B, sequence_B, call.num_rows),
        torch.where(begins_B, first_B, num_tokens),
    )
    counts_B = ends_S[1:] - ends_S[:-1]
    row_B = (ends_S[:-1] // queries).clamp(max=call.num_rows - 1)
    lengths_B = torch.where(counts_B > 0, starts_B[row_B] + counts_B, 0)
    return Sequences(ends_S, lengths_B, table_BW.index_select(0, row_B))

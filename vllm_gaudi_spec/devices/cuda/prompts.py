"""Prompt chunk attention with FlashAttention. Letters as in attention.py.

Rows that continue one another (`vllm_gaudi_spec.slices`) are rejoined, so that a tile can span several rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_gaudi_spec.upstream.flash_attention import find_flash_attention

if TYPE_CHECKING:
    from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec
    from vllm_gaudi_spec.devices.common.kv_pair import KVPair

_FEWEST_QUERIES = 32
"""The minimum number of queries per row: verify steps have fewer, prompt chunks and their slices at least this many."""
_FEWEST_LANES = 512 * 32
"""With fewer queries across all rows and heads, a GPU is full only if keys are split, as in attention.py."""


class Sequences(NamedTuple):
    """B sequences with adjacent queries. The last sequences are empty if rows were joined."""

    ends_S: torch.Tensor
    """int32 [B + 1]: cumulative numbers of queries, starting at 0."""
    lengths_B: torch.Tensor
    """int32: number of keys, including padding in the sequence's last row."""
    block_table_BW: torch.Tensor


def supports(spec: AttentionLayerSpec) -> bool:
    """Whether `attend` supports the layer's prompt chunks, if the layer is causal."""
    return (
        spec.dtype in (torch.bfloat16, torch.float16)
        and spec.kv_dtype is None
        and spec.head_size % 8 == 0
        and spec.head_size <= 256
        and find_flash_attention() is not None
    )


def takes(call: AttentionCall, spec: AttentionLayerSpec) -> bool:
    """Whether `attend` supports the call and is faster."""
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
    """Join rows that have the same blocks and begin where the preceding row ends."""
    queries, num_tokens = call.num_queries, call.num_rows * call.num_queries
    starts_B, table_BW = call.starts_B, call.block_table_BW
    continues = (table_BW[1:] == table_BW[:-1]).all(dim=1) & (starts_B[1:] == starts_B[:-1] + queries)
    begins_B = torch.cat([continues.new_ones(1), ~continues])
    sequence_B = begins_B.cumsum(0) - 1
    # Rows that continue a sequence only rewrite the last entry.
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

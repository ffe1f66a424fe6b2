"""An attention layer and its calls as the backends see them."""

from typing import Any

import torch

from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec


def layer(**changes: Any) -> AttentionLayerSpec:
    plain: dict[str, Any] = dict(
        num_heads=8,
        num_kv_heads=2,
        head_size=64,
        scale=0.125,
        sliding_window=None,
        logits_soft_cap=0.0,
        dtype=torch.bfloat16,
        block_size=128,
    )
    return AttentionLayerSpec(**plain | changes)


def call(
    starts: list[int], tables: list[list[int]], num_queries: int = 1, *, device: str = "cpu", **options: Any
) -> AttentionCall:
    """Return a call with a row for each start, over the blocks of its table."""
    starts_B, table_BW = (torch.tensor(values, dtype=torch.int32).to(device) for values in (starts, tables))
    return AttentionCall(
        num_rows=len(starts), num_queries=num_queries, starts_B=starts_B, block_table_BW=table_BW, **options
    )

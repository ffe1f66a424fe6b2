"""An attention layer as the backends see it."""

from typing import Any

import torch

from vllm_gaudi_spec.attention.metadata import AttentionLayerSpec


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

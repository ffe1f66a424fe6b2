"""Device-neutral description of an attention layer and of one attention call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayerSpec:
    """What is fixed about a layer. Hashable: plans are kept per distinct spec."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None
    logits_soft_cap: float
    dtype: torch.dtype
    block_size: int


@dataclass(slots=True, kw_only=True)
class AttentionCall:
    """A rectangle of B rows with Q queries each over paged KV; prefill and decode alike.

    Query q of row b stands at position starts_B[b] + q and sees the keys 0 .. that position. Queries behind a row's
    real ones are padding: what they compute is never used, and their keys go to the pad block.
    """

    num_rows: int
    num_queries: int
    starts_B: torch.Tensor
    """int32: position of the first query of each row."""
    block_table_BW: torch.Tensor
    """int32: the row's blocks; block 0 is the pad block."""
    num_real_queries: int | None = None
    """Known on the host for a single row: how many of its queries are real."""
    _plans: dict[Any, Any] = field(default_factory=dict)

    def plan(self, key: Any, build: Callable[[], Any]) -> Any:
        """What a kernel derives from this call and a layer's spec, made once and shared by all such layers."""
        if key not in self._plans:
            self._plans[key] = build()
        return self._plans[key]

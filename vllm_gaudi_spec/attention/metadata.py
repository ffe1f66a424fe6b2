"""Device-neutral description of an attention layer and of one attention call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class KVShape(NamedTuple):
    """Shape and dtype of a layer's KV cache, whatever container the device uses."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    row_size: int
    """Numbers per token and head: a key, and a value where values are stored."""
    dtype: torch.dtype

    def __str__(self) -> str:
        return (
            f"{self.num_blocks} blocks of {self.block_size} tokens, {self.num_kv_heads} heads of {self.row_size} "
            f"numbers, {self.dtype}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayerSpec:
    """Constants of a layer. Hashable: plans are cached per distinct spec."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None
    """How many of the last keys a query sees, itself included; None: all."""
    logits_soft_cap: float
    dtype: torch.dtype
    block_size: int
    value_size: int | None = None
    """For a layer that stores no values: how many of a key's first numbers are its value."""
    attention_chunk: int | None = None
    """Queries see keys of their own chunk only: chunks have so many positions."""
    layer_operations: bool = False
    """Its matmuls, softmax and caches are modules of the layer, which no fused kernel would call."""
    kv_dtype: torch.dtype | None = None
    """Of its caches, where it is not `dtype`: keys and values are written and read through the layer's operations."""
    model_type: str = ""
    """As transformers names it: a kernel's precision may do for some models only."""

    @property
    def output_size(self) -> int:
        return self.head_size if self.value_size is None else self.value_size

    @property
    def mask_key(self) -> tuple[int | None, int | None, int]:
        """Layers with the same key have the same mask."""
        return self.sliding_window, self.attention_chunk, self.block_size


@dataclass(frozen=True, slots=True)
class FlatBlocks:
    """The blocks of all rows in one list, so that a step's work grows with the rows' blocks, not with the longest row.

    Entries may be in any order. Blocks that none of the row's queries can read any more need not be listed.
    """

    ids_N: torch.Tensor
    """int32 block ids; padding is block 0."""
    rows_N: torch.Tensor
    """int32: the row of the batch that owns the entry; padding has row B, which does not exist."""
    index_N: torch.Tensor
    """int32: the entry's index in its row's block table: its first key is at position index * block_size."""


class Packed(NamedTuple):
    """The real tokens of a rectangle."""

    index_T: torch.Tensor
    """int64: index of each real token in the flat rectangle."""
    num_real_B: torch.Tensor
    """int32: how many each row has."""


@dataclass(slots=True, kw_only=True)
class AttentionCall:
    """A rectangle of B rows with Q queries each over paged KV; prefill and decode alike.

    Query q of row b is at position starts_B[b] + q and sees the keys 0 .. that position. Queries after a row's real
    ones are padding: their results are never used, and their keys go to the pad block.
    """

    num_rows: int
    num_queries: int
    starts_B: torch.Tensor
    """int32: position of the first query of each row."""
    block_table_BW: torch.Tensor
    """int32: the row's blocks; block 0 is the pad block."""
    packed: Packed | None = None
    """Where queries are real ones only, row after row: their indices."""
    flat: FlatBlocks | None = None
    """The same blocks as a list, for backends that attend over one."""
    host_lengths_B: torch.Tensor | None = None
    """int32, on the host, for backends that need it: an upper bound of the keys that a row's queries see. `starts_B`
    has the exact numbers."""
    _plans: dict[Any, Any] = field(default_factory=dict)

    def plan(self, key: Any, build: Callable[[], Any]) -> Any:
        """What a kernel derives from this call and a layer's spec, built once and shared by all such layers."""
        if key not in self._plans:
            self._plans[key] = build()
        return self._plans[key]

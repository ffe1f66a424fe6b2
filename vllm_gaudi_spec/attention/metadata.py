"""Device-neutral description of an attention layer and of one attention call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class KVShape(NamedTuple):
    """What a layer's KV cache holds, whatever the device keeps it in."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    row_size: int
    """Numbers per token and head: a key, and a value where values are kept."""
    dtype: torch.dtype

    def __str__(self) -> str:
        return (
            f"{self.num_blocks} blocks of {self.block_size} tokens, {self.num_kv_heads} heads of {self.row_size} "
            f"numbers, {self.dtype}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayerSpec:
    """What is fixed about a layer. Hashable: plans are kept per distinct spec."""

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
    """Of a layer that keeps no values: how many of a key's first numbers are its value."""
    attention_chunk: int | None = None
    """Queries see keys of their own chunk only: positions are cut into chunks of so many."""
    layer_operations: bool = False
    """Its matmuls, softmax and caches are modules of its own, which no fused kernel would call."""

    @property
    def output_size(self) -> int:
        return self.head_size if self.value_size is None else self.value_size

    @property
    def mask_key(self) -> tuple[int | None, int | None, int]:
        """Layers with the same one have the same mask."""
        return self.sliding_window, self.attention_chunk, self.block_size


@dataclass(frozen=True, slots=True)
class FlatBlocks:
    """The blocks of all rows in one list, so that a step's work follows the blocks that rows have, not the longest row.

    Entries may stand in any order. A row's blocks that no query of it can read any more need not be listed.
    """

    ids_N: torch.Tensor
    """int32 block ids; padding is block 0."""
    rows_N: torch.Tensor
    """int32: the row of the batch that owns the entry; padding belongs to row B, nobody."""
    index_N: torch.Tensor
    """int32: the entry's place in its row: its first key stands at place * block_size."""


class Packed(NamedTuple):
    """Of a rectangle, what is not padding."""

    index_T: torch.Tensor
    """int64: where in the flat rectangle each real token stands."""
    num_real_B: torch.Tensor
    """int32: how many each row has."""


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
    packed: Packed | None = None
    """Where only real queries are given, one behind the other: which those are."""
    flat: FlatBlocks | None = None
    """The same blocks as a list, for backends that attend over one."""
    host_lengths_B: torch.Tensor | None = None
    """int32, on the host, for backends that need it: a row's queries see no key behind so many. An upper bound; which
    keys a query sees, `starts_B` says."""
    _plans: dict[Any, Any] = field(default_factory=dict)

    def plan(self, key: Any, build: Callable[[], Any]) -> Any:
        """What a kernel derives from this call and a layer's spec, made once and shared by all such layers."""
        if key not in self._plans:
            self._plans[key] = build()
        return self._plans[key]

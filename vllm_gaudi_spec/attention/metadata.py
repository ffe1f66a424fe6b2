"""Device-neutral description of a forward: a rectangle of tokens with positions and KV slots, and its attention calls.

vLLM's model classes take the tokens, our attention backend the rest, by vLLM's forward context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_gaudi_spec.attention.row_operations import RowOperations


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
    """Constants of a layer. Hashable: plans are cached per distinct spec, and none depends on its tensors."""

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
    num_selected: int | None = None
    """A query reads only so many of the keys that it sees: those that an indexer scores highest. None: all."""
    index_size: int = 0
    """How many of a key's last numbers are the indexer's. 0: the layer reads what the layer before it selected."""
    attention_chunk: int | None = None
    """Queries see keys of their own chunk only: chunks have so many positions."""
    is_causal: bool = True
    """Else, as in an encoder, a query sees the keys after its own too: under a window as many as of those before it."""
    layer_operations: bool = False
    """Its matmuls, softmax and caches are modules of the layer, which no fused kernel would call."""
    kv_dtype: torch.dtype | None = None
    """Of its caches, where it is not `dtype`: keys and values are written and read through the layer's operations."""
    model_type: str = ""
    """As transformers names it: a kernel's precision may do for some models only."""
    batch_invariant: bool = False
    """The order in which a query's keys are added must depend on nothing but their positions."""
    sinks_H: torch.Tensor | None = field(default=None, compare=False)
    """One more score of each head, with a value of zero: it takes its share of the weights, and nothing else."""
    slopes_H: torch.Tensor | None = field(default=None, compare=False)
    """ALiBi, float32: what a key's score loses for each position between it and the query."""

    @property
    def has_plain_scores(self) -> bool:
        """Whether a score is a product of a query and a key alone, scaled."""
        return not self.logits_soft_cap and self.sinks_H is None and self.slopes_H is None

    @property
    def output_size(self) -> int:
        return self.head_size if self.value_size is None else self.value_size

    @property
    def mask_key(self) -> tuple[int | None, int | None, int, bool]:
        """Layers with the same key have the same mask."""
        return self.sliding_window, self.attention_chunk, self.block_size, self.is_causal


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
    """The real tokens of a rectangle: where nothing is compiled per shape, a model computes no padding."""

    index_T: torch.Tensor
    """int64: index of each real token in the flat rectangle."""
    num_real_B: torch.Tensor
    """int32: how many each row has."""

    @classmethod
    def of(cls, num_real_B: torch.Tensor, num_queries: int) -> Packed | None:
        """None where all tokens are real, or, as in warm-up, none is."""
        # The host has these tensors, and a sum of a list is a tenth of what the index costs.
        if sum(num_real_B.tolist()) in (0, len(num_real_B) * num_queries):
            return None
        offsets_Q = torch.arange(num_queries, dtype=torch.int32)
        return cls((offsets_Q < num_real_B[:, None]).flatten().nonzero().flatten(), num_real_B)

    def spread(self, states: torch.Tensor, num_positions: int) -> torch.Tensor:
        """States of real tokens at their positions in the rectangle; zero where there is padding."""
        return states.new_zeros(num_positions, *states.shape[1:]).index_copy_(0, self.index_T, states)


class SpanRows(NamedTuple):
    """Spans as rows of their own."""

    rows_S: torch.Tensor
    """int64: the row of the batch."""
    firsts_S: torch.Tensor
    """int32: the position of the first token, which may have been computed earlier,"""
    lasts_S: torch.Tensor
    """and of the last."""


class Spans(NamedTuple):
    """Positions whose tokens see each other in both directions, as those of an image do for some models: a query of
    one sees all its keys, later ones too. None is longer than a window, and all keys are written before its queries
    attend."""

    lasts_BQ: torch.Tensor
    """int32: the last position of a query's span; 0 where it is of none."""
    rows: SpanRows | None = None
    """None where steps are captured, since there are more or less of them in each; never empty."""
    in_windows_only: bool = False
    """Whether layers without a sliding window see in one direction alone."""


class IndexQueries(NamedTuple):
    """A layer's own scores of keys, by which it selects some. I heads of R numbers each, which all score one key: a
    score is the sum of the heads' products, those above zero alone, each by its weight."""

    query_TIR: torch.Tensor
    weights_TI: torch.Tensor
    """float32."""

    def spread(self, packed: Packed, num_positions: int) -> IndexQueries:
        return IndexQueries(*(packed.spread(tensor, num_positions) for tensor in self))


@dataclass(slots=True, kw_only=True)
class AttentionCall:
    """A rectangle of B rows with Q queries each over paged KV; prefill and decode alike.

    Query q of row b is at position starts_B[b] + q and sees the keys 0 .. that position, in a layer that is not causal
    those of all the row's real queries. Queries after a row's real ones are padding: their results are never used, and
    their keys go to the pad block.
    """

    num_rows: int
    num_queries: int
    starts_B: torch.Tensor
    """int32: position of the first query of each row."""
    block_table_BW: torch.Tensor
    """int32: the row's blocks; block 0 is the pad block."""
    num_real_B: torch.Tensor | None = None
    """int32: how many of each row's queries are not padding. Causal layers need not know."""
    packed: Packed | None = None
    """Where queries are real ones only, row after row: their indices."""
    flat: FlatBlocks | None = None
    """The same blocks as a list, for backends that attend over one."""
    host_lengths_B: torch.Tensor | None = None
    """int32, on the host, for backends that need it: an upper bound of the keys that a row's queries see. `starts_B`
    has the exact numbers."""
    host_counts_B: torch.Tensor | None = None
    """The same of prompt chunks: of how many queries a row's chunk is. Then `host_lengths_B` is exact. A head may read
    less of a chunk, which begins after as many keys."""
    spans: Spans | None = None
    """Of prompt chunks alone: a decode may have the last token of an image, which sees no later one."""
    index: IndexQueries | None = None
    """Of a layer that selects keys; a forward's call has none."""
    own_kv: tuple[torch.Tensor, torch.Tensor] | None = None
    """[T, K, D] each: keys and values of the call's own tokens, which the layer's cache holds as well. Set for devices
    with `reads_own_kv`, and not for a layer that reads another layer's cache."""
    _plans: dict[Any, Any] = field(default_factory=dict)

    def plan(self, key: Any, build: Callable[[], Any]) -> Any:
        """What a kernel derives from this call and a layer's spec, built once and shared by all such layers."""
        if key not in self._plans:
            self._plans[key] = build()
        return self._plans[key]

    def with_index(self, index: IndexQueries | None) -> AttentionCall:
        """The same call, with the same plans, for a layer that selects keys."""
        return self if index is self.index else replace(self, index=index)

    @property
    def selection(self) -> torch.Tensor | None:
        """What the last layer with an indexer selected, in the form that attends; for the layers after it."""
        return self._plans.get("selection")

    def keep_selection(self, selection: torch.Tensor) -> None:
        self._plans["selection"] = selection


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCall:
    """The same rectangle as layers with a recurrent state see it."""

    rows_B: torch.Tensor
    """int64: rows of the request state, which states are kept by; padding has the pad row."""
    starts_B: torch.Tensor
    """int32: position of each row's first token."""
    num_real_B: torch.Tensor
    """int32: how many of a row's tokens are not padding."""
    num_pending_B: torch.Tensor
    """int32: how many tokens before the first are not in the row's state yet; they are kept beside it."""
    num_queries: int
    commits: bool
    """Whether the real tokens go into the state now. Else they are pending: some may be drafts that are rejected."""
    packed: Packed | None = None

    def by_row(self, tensor_T: torch.Tensor) -> torch.Tensor:
        """[B, Q, ...]"""
        shape = (len(self.rows_B), self.num_queries)
        if self.packed is not None:
            tensor_T = self.packed.spread(tensor_T, shape[0] * shape[1])
        return tensor_T.unflatten(0, shape)

    def flat(self, tensor_BQ: torch.Tensor) -> torch.Tensor:
        """[T, ...]: the reverse."""
        tensor_T = tensor_BQ.flatten(0, 1)
        return tensor_T if self.packed is None else tensor_T.index_select(0, self.packed.index_T)


# --- a forward ---


NO_MEDIA = 0
"""In place of the row of a token that is none of an image. Row 0 and those of other pads are never read."""


class MultimodalInputs(NamedTuple):
    """What images, video and audio change of a forward's tokens. D: dimensions of a rotary position."""

    embeddings: Sequence[torch.Tensor] = ()
    """[n, H] of encoders, in the order of the tokens that they replace,"""
    is_media_T: torch.Tensor | None = None
    """bool: which those are; None where there are no embeddings."""
    rows_T: torch.Tensor | None = None
    """int64: in place of both, where steps are captured: each token's row in the store of encoders' outputs."""
    embeds_NH: torch.Tensor | None = None
    """Rows of prompts of embeddings, in the order of the tokens that they replace,"""
    is_embeds_T: torch.Tensor | None = None
    """bool: and which those are."""
    rotary_DT: torch.Tensor | None = None
    """int64: positions for rotary embeddings, where any are not those of the tokens."""
    offset_B: torch.Tensor | None = None
    """int64, of a decode: the same as a difference, since all dimensions of a position are alike there."""
    spans: Spans | None = None
    """For models whose images are seen in both directions."""

    @property
    def has_embeddings(self) -> bool:
        return bool(self.embeddings) or self.rows_T is not None or self.embeds_NH is not None

    def rotary(self, positions_T: torch.Tensor) -> torch.Tensor | None:
        if self.offset_B is None:
            return self.rotary_DT
        # Padding has position 0, and tables of rotary embeddings begin there.
        return (positions_T.view(len(self.offset_B), -1) + self.offset_B[:, None]).flatten().clamp(min=0)

    def pack(self, index_T: torch.Tensor) -> MultimodalInputs:
        """Of the real tokens alone, among which all those of media are."""
        masks = {"is_media_T": self.is_media_T, "is_embeds_T": self.is_embeds_T}
        return self._replace(
            **{name: mask.index_select(0, index_T) for name, mask in masks.items() if mask is not None}
        )


@dataclass(frozen=True, slots=True)
class Inputs:
    """T = B * Q tokens, flat as vLLM's model classes take them."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    """int64 [T], one a KV cache group."""
    calls: tuple[AttentionCall, ...]
    num_real_B: torch.Tensor
    """int32: of each row, how many tokens are not padding."""
    adapters_T: torch.Tensor | None = None
    """int32: the slot of each token's LoRA adapter, where there are adapters."""
    states: StateCall | None = None
    """For models with recurrent layers."""
    multimodal: MultimodalInputs | None = None
    """For models that take images, video or audio."""
    rotary: torch.Tensor | None = None
    """int64 [T] or [D, T]: positions for rotary embeddings, where they are others."""
    token_types_T: torch.Tensor | None = None
    """int32: which of two texts a token is of, for models that compare texts."""

    @property
    def call(self) -> AttentionCall | StateCall:
        """The rectangle, which is the same in all calls. Models without attention have that of their states."""
        if self.calls:
            return self.calls[0]
        assert self.states is not None
        return self.states

    def real_T(self) -> torch.Tensor:
        """bool [T]: which tokens are not padding."""
        call = self.call
        if call.packed is not None:
            return torch.ones_like(self.token_ids_T, dtype=torch.bool)
        offsets_Q = torch.arange(call.num_queries, dtype=torch.int32, device=self.num_real_B.device)
        return (offsets_Q < self.num_real_B[:, None]).flatten()

    def with_media(self, multimodal: MultimodalInputs) -> Inputs:
        calls = self.calls
        if multimodal.spans is not None:
            calls = tuple(replace(call, spans=multimodal.spans, _plans={}) for call in calls)
        return replace(self, multimodal=multimodal, rotary=multimodal.rotary(self.positions_T), calls=calls)

    def pack(self, packed: Packed) -> Inputs:
        """Of the real tokens alone."""
        index_T = packed.index_T
        return replace(
            self,
            token_ids_T=self.token_ids_T.index_select(0, index_T),
            positions_T=self.positions_T.index_select(0, index_T),
            slots=tuple(slots_T.index_select(0, index_T) for slots_T in self.slots),
            calls=tuple(replace(call, packed=packed, _plans={}) for call in self.calls),
            adapters_T=None if self.adapters_T is None else self.adapters_T.index_select(0, index_T),
            states=None if self.states is None else replace(self.states, packed=packed),
            multimodal=None if self.multimodal is None else self.multimodal.pack(index_T),
            rotary=None if self.rotary is None else self.rotary.index_select(-1, index_T),
            token_types_T=None if self.token_types_T is None else self.token_types_T.index_select(0, index_T),
        )


class Blocks(NamedTuple):
    """The KV blocks of a batch's rows, for each KV cache group."""

    tables: tuple[torch.Tensor, ...]
    """int32 [B, W]."""
    sizes: tuple[int, ...]
    """Tokens in a block."""
    flat: tuple[torch.Tensor, ...] = ()
    """int32 [3, N]: the same blocks in one list, as `FlatBlocks` has them; for devices that decode over such lists."""
    lengths_B: torch.Tensor | None = None
    """int32, on the host: an upper bound of each row's tokens of KV when the graph that reads this ends, whatever is in
    flight; for devices that read tables and need it."""
    counts_B: torch.Tensor | None = None
    """int32, on the host, with those of prompt chunks: how many tokens each row has, and then those are exact."""


class HostBlocks(NamedTuple):
    """The same on the host, before `StepInputs.pack` copies it to the device."""

    tables: tuple[np.ndarray, ...] = ()
    sizes: tuple[int, ...] = ()
    flat: tuple[np.ndarray, ...] = ()
    lengths_B: torch.Tensor | None = None
    counts_B: torch.Tensor | None = None


_SECTION = 16
"""Sections of a packed tensor begin at multiples of so many numbers, as kernels prefer aligned addresses."""


class Packing(NamedTuple):
    """Several int32 tensors packed into one, which is copied to the device at once and split inside the graph."""

    packed: torch.Tensor
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def pack(cls, arrays: Sequence[np.ndarray], upload: Callable[[torch.Tensor], torch.Tensor]) -> Packing:
        packed_np = np.zeros(sum(_round_up(array.size) for array in arrays), dtype=np.int32)
        begin = 0
        for array in arrays:
            packed_np[begin : begin + array.size] = array.reshape(-1)
            begin += _round_up(array.size)
        return cls(upload(torch.from_numpy(packed_np)), tuple(array.shape for array in arrays))

    def split(self) -> list[torch.Tensor]:
        """Return the tensors, as views."""
        parts, begin = [], 0
        for shape in self.shapes:
            size = math.prod(shape)
            parts.append(self.packed.narrow(0, begin, size).view(shape))
            begin += _round_up(size)
        return parts


def _round_up(size: int) -> int:
    return -(-size // _SECTION) * _SECTION


class RowInputs(NamedTuple):
    """`StepInputs` on the device, split."""

    rows_B: torch.Tensor
    """int64: rows of the request state; padding has the pad row."""
    starts_B: torch.Tensor
    """int32, as the host knows it: the position of each row's first token,"""
    counts_B: torch.Tensor
    """int32: how many tokens it has,"""
    max_drafts_B: torch.Tensor
    """int32: and the most drafts that it may have after this step, besides the limits of its request."""
    more_BX: torch.Tensor | None
    """int32: what a drafter on the host has for each row."""
    blocks: Blocks


class StepInputs(NamedTuple):
    """All that a forward needs from the host, as one copy: which rows, where they begin, and their KV blocks."""

    packing: Packing
    block_sizes: tuple[int, ...]
    has_more: bool
    lengths_B: torch.Tensor | None
    counts_B: torch.Tensor | None
    """On the host, both as `Blocks` has them."""

    @classmethod
    def pack(
        cls,
        header_4B: np.ndarray,
        blocks: HostBlocks,
        upload: Callable[[torch.Tensor], torch.Tensor],
        more_BX: np.ndarray | None = None,
    ) -> StepInputs:
        """`header_4B`: rows, starts, counts and draft limits, in the order of `RowInputs`."""
        more = [] if more_BX is None else [more_BX]
        packing = Packing.pack([header_4B, *blocks.tables, *blocks.flat, *more], upload)
        return cls(packing, blocks.sizes, more_BX is not None, blocks.lengths_B, blocks.counts_B)

    @property
    def num_rows(self) -> int:
        return self.packing.shapes[0][1]

    def split(self) -> RowInputs:
        """Split the copy; inside a graph."""
        header_4B, *rest = self.packing.split()
        more_BX = rest.pop() if self.has_more else None
        num_groups = len(self.block_sizes)
        blocks = Blocks(
            tuple(rest[:num_groups]), self.block_sizes, tuple(rest[num_groups:]), self.lengths_B, self.counts_B
        )
        rows_B, starts_B, counts_B, max_drafts_B = header_4B.unbind(0)
        return RowInputs(rows_B.long(), starts_B, counts_B, max_drafts_B, more_BX, blocks)

    def header(self) -> StepInputs:
        """Copy the rows without their blocks, inside a graph: one shape for every context."""
        shape = self.packing.shapes[0]
        packing = Packing(self.packing.packed.narrow(0, 0, _round_up(math.prod(shape))).clone(), (shape,))
        return StepInputs(packing, (), has_more=False, lengths_B=None, counts_B=None)


def rectangle(
    tokens_BQ: torch.Tensor,
    starts_B: torch.Tensor,
    num_real_B: torch.Tensor,
    blocks: Blocks,
    row_operations: RowOperations,
) -> Inputs:
    """Rows of Q consecutive positions from `starts_B` on, of which the first `num_real_B` are real.

    Padding is token 0 at position 0, since rotary tables end at a model's last position, and writes to the pad block,
    block 0, which is never read: each token to a slot of its own, as far as a block has them. Kernels may promise
    nothing for a call that writes a slot twice.
    """
    tokens_T, positions_T, slots = row_operations.locate_rectangle(
        tokens_BQ, starts_B, num_real_B, blocks.tables, blocks.sizes
    )
    calls = _calls(tokens_BQ.shape[1], starts_B, num_real_B, blocks)
    return Inputs(tokens_T, positions_T, slots, calls, num_real_B)


def columns(
    starts_B: torch.Tensor, num_real_B: torch.Tensor, num_columns: int, blocks: Blocks, row_operations: RowOperations
) -> list[Inputs]:
    """Such a rectangle's columns, each a rectangle of one query a row, to be run one after another. The tokens are for
    the caller to fill in: all are 0. What all of them need is computed once."""
    located = row_operations.locate_columns(starts_B, num_real_B, num_columns, blocks.tables, blocks.sizes)
    no_tokens_B = torch.zeros_like(starts_B, dtype=torch.int32)

    def column(number: int) -> Inputs:
        column_starts_B, real_B = located.starts_QB[number], located.num_real_QB[number]
        calls = _calls(1, column_starts_B, real_B, blocks._replace(counts_B=None))
        slots = tuple(slots_QB[number] for slots_QB in located.slots)
        return Inputs(no_tokens_B, located.positions_QB[number], slots, calls, real_B)

    return [column(number) for number in range(num_columns)]


def _calls(queries: int, starts_B: torch.Tensor, num_real_B: torch.Tensor, blocks: Blocks) -> tuple[AttentionCall, ...]:
    return tuple(
        AttentionCall(
            num_rows=len(starts_B),
            num_queries=queries,
            starts_B=starts_B,
            block_table_BW=table,
            num_real_B=num_real_B,
            flat=FlatBlocks(*blocks.flat[group].unbind(0)) if blocks.flat else None,
            host_lengths_B=blocks.lengths_B,
            host_counts_B=blocks.counts_B,
        )
        for group, table in enumerate(blocks.tables)
    )

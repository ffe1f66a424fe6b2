"""Device-neutral description of a forward: a rectangle of tokens, their positions and KV slots, and attention calls.

vLLM's model classes take the tokens. Our attention backend gets the rest through vLLM's forward context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from vllm_gaudi_spec.attention.operations import PLAIN, Operations
from vllm_gaudi_spec.attention.row_operations import RowOperations


class KVShape(NamedTuple):
    """Shape and dtype of a layer's KV cache, whatever container the device uses."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    row_size: int
    """Elements per token and head: a key and, if the layer stores values, a value."""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayerSpec:
    """Constants of a layer.

    Specs are hashable, since plans are cached per distinct spec. No plan depends on its operations and tensors.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None
    """Number of last keys that a query sees, including its own; None for all."""
    logits_soft_cap: float
    dtype: torch.dtype
    block_size: int
    value_size: int | None = None
    """Number of leading elements of a key that form its value, for a layer that stores no values."""
    num_selected: int | None = None
    """Number of keys that a query reads of those it sees: the ones that an indexer scores highest; None for all."""
    index_size: int = 0
    """Number of trailing elements of a key that belong to the indexer; 0 if the layer reuses the previous layer's
    selection."""
    attention_chunk: int | None = None
    """Number of positions in a chunk, if queries see only the keys of their own chunk."""
    is_causal: bool = True
    """False for an encoder, whose queries also see later keys; a window then extends equally far both ways."""
    layer_operations: bool = False
    """Whether the layer has modules for its matmuls, softmax and caches, which a fused kernel would bypass."""
    kv_dtype: torch.dtype | None = None
    """Dtype of the KV cache if it is not `dtype`. `operations` then read and write keys and values."""
    model_type: str = ""
    """Model type in transformers, since a kernel's precision may be sufficient for some models only."""
    operations: Operations = field(default=PLAIN, compare=False, repr=False)
    """The layer's own modules if `layer_operations` or `kv_dtype` is set."""
    sinks_H: torch.Tensor | None = field(default=None, compare=False)
    """An additional score per head, whose value is zero: it only takes a share of the softmax."""
    slopes_H: torch.Tensor | None = field(default=None, compare=False)
    """ALiBi slopes in float32: how much a key's score decreases per position of distance from the query."""

    @property
    def has_plain_scores(self) -> bool:
        """Whether a score is just the scaled product of a query and a key."""
        return not self.logits_soft_cap and self.sinks_H is None and self.slopes_H is None

    @property
    def output_size(self) -> int:
        return self.head_size if self.value_size is None else self.value_size

    @property
    def mask_key(self) -> tuple[int | None, int | None, int, bool]:
        """Key that is equal for layers with the same mask."""
        return self.sliding_window, self.attention_chunk, self.block_size, self.is_causal


@dataclass(frozen=True, slots=True)
class FlatBlocks:
    """The blocks of all rows in one list, so that work grows with the total number of blocks, not with the longest row.

    Entries are groups of neighboring blocks, in any order. Blocks that none of a row's queries can read any more may be
    left out.
    """

    ids: torch.Tensor
    """int32 block ids, entry after entry; padding is block 0, also where an entry has fewer blocks than others."""
    rows_N: torch.Tensor
    """int32: row of the batch that owns the entry; B, which does not exist, for padding."""
    index_N: torch.Tensor
    """int32: index of the entry's first block in its row's table. Its first key is at position index * block_size."""

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> FlatBlocks:
        """Unpack an element of `Blocks.flat`."""
        return cls(packed[:-2].flatten(), packed[-2], packed[-1])

    @property
    def group_size(self) -> int:
        """Number of blocks in an entry."""
        return len(self.ids) // len(self.rows_N)


class Packed(NamedTuple):
    """The real tokens of a rectangle. Devices that compile nothing per shape compute only these."""

    index_T: torch.Tensor
    """int64: index of each real token in the flat rectangle."""
    num_real_B: torch.Tensor
    """int32: number of real tokens in each row."""

    @classmethod
    def from_counts(cls, num_real_B: torch.Tensor, num_queries: int) -> Packed | None:
        """Return the real tokens' indices, or None if all tokens are real or, as in warm-up, none is."""
        # These tensors are on the host, where summing a list costs a tenth of computing the index.
        if sum(num_real_B.tolist()) in (0, len(num_real_B) * num_queries):
            return None
        offsets_Q = torch.arange(num_queries, dtype=torch.int32)
        return cls((offsets_Q < num_real_B[:, None]).flatten().nonzero().flatten(), num_real_B)

    def spread(self, states: torch.Tensor, num_positions: int) -> torch.Tensor:
        """Return states at the positions of their tokens in the rectangle, with zeros at padding."""
        return states.new_zeros(num_positions, *states.shape[1:]).index_copy_(0, self.index_T, states)


class SpanRows(NamedTuple):
    rows_S: torch.Tensor
    """int64: row of the batch."""
    firsts_S: torch.Tensor
    """int32: position of the first token, which an earlier chunk may have computed."""
    lasts_S: torch.Tensor
    """int32: position of the last token."""


class Spans(NamedTuple):
    """Positions whose tokens see each other in both directions, such as those of an image in some models.

    A query within a span also sees the span's later keys. No span is longer than a window, and all keys of a span are
    written before its queries attend.
    """

    lasts_BQ: torch.Tensor
    """int32: last position of the span that a query belongs to; 0 if it belongs to none."""
    rows: SpanRows | None = None
    """Never empty. None where steps are captured, since the number of spans changes from step to step."""
    in_windows_only: bool = False
    """Whether spans apply only to layers with a sliding window."""


class IndexQueries(NamedTuple):
    """Queries with which a layer scores keys to select some of them. I: index heads. R: elements of each.

    All heads score the same key. Its score is the weighted sum of their products, of which negative ones count as zero.
    """

    query_TIR: torch.Tensor
    weights_TI: torch.Tensor
    """float32."""

    def spread(self, packed: Packed, num_positions: int) -> IndexQueries:
        return IndexQueries(*(packed.spread(tensor, num_positions) for tensor in self))


@dataclass(slots=True, kw_only=True)
class AttentionCall:
    """A rectangle of B rows with Q queries each over paged KV, for prefill and decode alike.

    Query q of row b is at position starts_B[b] + q. It sees the keys up to that position or, in a layer that is not
    causal, those of all real queries of the row. Results of queries after a row's real ones are never used, and their
    keys go to the pad block.
    """

    num_rows: int
    num_queries: int
    starts_B: torch.Tensor
    """int32: position of the first query of each row."""
    block_table_BW: torch.Tensor
    """int32: blocks of each row; block 0 is the pad block."""
    num_real_B: torch.Tensor | None = None
    """int32: number of queries of each row that are not padding. Causal layers do not need it."""
    packed: Packed | None = None
    """Indices of the real queries, if the call has only those, row after row."""
    flat: FlatBlocks | None = None
    """The same blocks as one list, for backends that attend over a list."""
    host_lengths_B: torch.Tensor | None = None
    """int32 in host memory, for backends that need it: an upper bound of the keys that a row's queries see.

    `starts_B` gives the exact numbers.
    """
    host_counts_B: torch.Tensor | None = None
    """int32 in host memory, for prompt chunks: number of queries of each row, for which `host_lengths_B` is exact.

    A head may read a shorter part of a chunk, which begins after the same number of keys.
    """
    spans: Spans | None = None
    """Spans of prompt chunks. A decode has none, as the last token of an image sees no later token anyway."""
    from_start: bool = False
    """Whether every row's first query is at position 0."""
    fresh_kv: tuple[torch.Tensor, ...] = ()
    """Keys and values of the queries, [T, K, D] each, if `from_start` and the KV cache stores them as they are; else
    empty."""
    index: IndexQueries | None = None
    """Set by a layer that selects keys; None in the call of a forward."""
    _plans: dict[Any, Any] = field(default_factory=dict)

    def plan(self, key: Any, build: Callable[[], Any]) -> Any:
        """Return what a kernel derives from this call and a layer's spec, built once for all layers with that spec."""
        if key not in self._plans:
            self._plans[key] = build()
        return self._plans[key]

    def replace_index(self, index: IndexQueries | None) -> AttentionCall:
        """Return the same call, sharing its plans, with the index queries of a layer."""
        return self if index is self.index else replace(self, index=index)

    @property
    def selection(self) -> torch.Tensor | None:
        """Selection of the last layer with an indexer, for the layers after it."""
        return self._plans.get("selection")

    def keep_selection(self, selection: torch.Tensor) -> None:
        self._plans["selection"] = selection


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCall:
    """The same rectangle, as layers with a recurrent state see it."""

    rows_B: torch.Tensor
    """int64: rows of the request state, by which states are kept; padding has the pad row."""
    starts_B: torch.Tensor
    """int32: position of each row's first token."""
    num_real_B: torch.Tensor
    """int32: number of tokens of each row that are not padding."""
    num_pending_B: torch.Tensor
    """int32: number of tokens before the first that are not yet in the row's state but kept beside it."""
    num_queries: int
    commits: bool
    """Whether the real tokens enter the state now. Otherwise they stay pending, since some may be rejected drafts."""
    packed: Packed | None = None

    def unflatten(self, tensor_T: torch.Tensor) -> torch.Tensor:
        """Reshape [T, ...] to [B, Q, ...]."""
        shape = (len(self.rows_B), self.num_queries)
        if self.packed is not None:
            tensor_T = self.packed.spread(tensor_T, shape[0] * shape[1])
        return tensor_T.unflatten(0, shape)

    def flatten(self, tensor_BQ: torch.Tensor) -> torch.Tensor:
        """Reshape [B, Q, ...] to [T, ...]."""
        tensor_T = tensor_BQ.flatten(0, 1)
        return tensor_T if self.packed is None else tensor_T.index_select(0, self.packed.index_T)


# --- a forward ---


NO_MEDIA = 0
"""Row of the media store for a token that belongs to no image. It is never read, nor are the rows of other pads."""


class MultimodalInputs(NamedTuple):
    """The changes that images, video and audio make to a forward's tokens. D: dimensions of a rotary position."""

    embeddings: Sequence[torch.Tensor] = ()
    """[n, H] of each encoded item, in the order of the tokens that they replace."""
    is_media_T: torch.Tensor | None = None
    """bool: tokens that `embeddings` replace; None if there are none."""
    rows_T: torch.Tensor | None = None
    """int64: each token's row in the media store. Replaces both of the above where steps are captured."""
    rotary_DT: torch.Tensor | None = None
    """int64: positions for rotary embeddings, where some differ from the tokens' positions."""
    spans: Spans | None = None
    """Spans of images, for models that attend to them in both directions."""

    @property
    def has_embeddings(self) -> bool:
        return bool(self.embeddings) or self.rows_T is not None

    def pack(self, index_T: torch.Tensor) -> MultimodalInputs:
        """Keep only the real tokens, which include all tokens of media."""
        if self.is_media_T is None:
            return self
        return self._replace(is_media_T=self.is_media_T.index_select(0, index_T))


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of a model for T = B * Q tokens, flat as vLLM's model classes take them."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    """int64 [T] for each KV cache group."""
    calls: tuple[AttentionCall, ...]
    num_real_B: torch.Tensor
    """int32: number of tokens of each row that are not padding."""
    adapters_T: torch.Tensor | None = None
    """int32: slot of each token's LoRA adapter; None without adapters."""
    states: StateCall | None = None
    """The rectangle as layers with a recurrent state see it; None without such layers."""
    multimodal: MultimodalInputs | None = None
    """Inputs from images, video and audio; None for models or batches without any."""
    rotary: torch.Tensor | None = None
    """int64 [T] or [D, T]: positions for rotary embeddings, if they differ from `positions_T`."""
    token_types_T: torch.Tensor | None = None
    """int32: which of two texts a token belongs to, for models that compare texts."""
    head_layer: int = 0
    """Index of the layer to run, for heads whose layers run one at a time."""

    @property
    def call(self) -> AttentionCall | StateCall:
        """The rectangle, which all calls share. Models without attention have that of their states."""
        if self.calls:
            return self.calls[0]
        assert self.states is not None
        return self.states

    def mark_real(self) -> torch.Tensor:
        """Return bool [T]: which tokens are not padding."""
        call = self.call
        if call.packed is not None:
            return torch.ones_like(self.token_ids_T, dtype=torch.bool)
        offsets_Q = torch.arange(call.num_queries, dtype=torch.int32, device=self.num_real_B.device)
        return (offsets_Q < self.num_real_B[:, None]).flatten()

    def add_media(self, multimodal: MultimodalInputs) -> Inputs:
        calls = self.calls
        if multimodal.spans is not None:
            calls = tuple(replace(call, spans=multimodal.spans, _plans={}) for call in calls)
        rotary = self.rotary if multimodal.rotary_DT is None else multimodal.rotary_DT
        return replace(self, multimodal=multimodal, rotary=rotary, calls=calls)

    def shift_rotary(self, offset_B: torch.Tensor) -> Inputs:
        """Return the inputs with rotary positions that differ from the tokens' positions by an offset for each row."""
        # Padding has position 0, where tables of rotary embeddings begin.
        rotary_T = (self.positions_T.view(len(offset_B), -1) + offset_B[:, None]).flatten().clamp(min=0)
        return replace(self, rotary=rotary_T)

    def pack(self, packed: Packed) -> Inputs:
        """Keep only the real tokens."""
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
    """Number of tokens in a block."""
    flat: tuple[torch.Tensor, ...] = ()
    """int32 [group size + 2, N]: the fields of `FlatBlocks` one after another, for devices that decode over lists."""
    lengths_B: torch.Tensor | None = None
    """int32 in host memory, for devices that need it: an upper bound of each row's tokens of KV when the graph ends."""
    counts_B: torch.Tensor | None = None
    """int32 in host memory, for prompt chunks: number of tokens of each row, for which `lengths_B` is exact."""


def build_rectangle(
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


def build_columns(
    starts_B: torch.Tensor, num_real_B: torch.Tensor, num_columns: int, blocks: Blocks, row_operations: RowOperations
) -> list[Inputs]:
    """The columns of such a rectangle, to be run one after another; each is a rectangle with one query per row. The
    tokens are for the caller to fill in: all are 0. What all of them need is computed once."""
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
            flat=FlatBlocks.unpack(blocks.flat[group]) if blocks.flat else None,
            host_lengths_B=blocks.lengths_B,
            host_counts_B=blocks.counts_B,
        )
        for group, table in enumerate(blocks.tables)
    )

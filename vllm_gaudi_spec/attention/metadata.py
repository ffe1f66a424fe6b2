"""Device-independent description of a forward pass: a padded batch of tokens, positions, KV slots and attention calls.

vLLM's model classes receive the tokens. Our attention backend receives everything else through vLLM's forward context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from vllm_gaudi_spec.attention.operations import PLAIN, Operations
from vllm_gaudi_spec.attention.row_operations import RowOperations


class KVShape(NamedTuple):
    """Shape and dtype of a layer's KV cache, independent of the device's container type."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    row_size: int
    """Number of elements per token and head, counting the key and, if the layer stores values, the value."""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayerSpec:
    """Constants that describe an attention layer.

    Specs are hashable so that plans can be cached by spec. Plans never depend on a spec's operations or tensors.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None
    """Number of most recent keys that a query attends to, including its own, or None for all."""
    logits_soft_cap: float
    dtype: torch.dtype
    block_size: int
    value_size: int | None = None
    """Number of leading key elements that form the value, for a layer that stores no values."""
    num_selected: int | None = None
    """Number of keys that a query attends to: the visible keys with the highest index scores. None means all keys."""
    index_size: int = 0
    """Number of trailing key elements that belong to the indexer, or 0 if the layer reuses an earlier selection."""
    attention_chunk: int | None = None
    """Number of positions in a chunk, if queries attend only to keys in their own chunk."""
    is_causal: bool = True
    """False for an encoder, whose queries also attend to later keys. Windows then extend equally in both directions."""
    layer_operations: bool = False
    """Whether the layer has its own modules for matmuls, softmax and caches, which a fused kernel would bypass."""
    kv_dtype: torch.dtype | None = None
    """The KV cache's dtype, if it differs from `dtype`. In that case, `operations` read and write keys and values."""
    model_type: str = ""
    """The model type in transformers. Some kernels are precise enough only for certain models."""
    operations: Operations = field(default=PLAIN, compare=False, repr=False)
    """The layer's own modules if `layer_operations` or `kv_dtype` is set."""
    sinks_H: torch.Tensor | None = field(default=None, compare=False)
    """Attention sinks: an additional score per head. Its value vector is zero, so it affects only the denominator."""
    slopes_H: torch.Tensor | None = field(default=None, compare=False)
    """ALiBi slopes in float32: how much a key's score decreases per position between key and query."""

    @property
    def has_plain_scores(self) -> bool:
        """Whether scores are only scaled dot products of queries and keys."""
        return not self.logits_soft_cap and self.sinks_H is None and self.slopes_H is None

    @property
    def output_size(self) -> int:
        return self.head_size if self.value_size is None else self.value_size

    @property
    def mask_key(self) -> tuple[int | None, int | None, int, bool]:
        """Cache key that is equal for layers with the same mask."""
        return self.sliding_window, self.attention_chunk, self.block_size, self.is_causal


@dataclass(frozen=True, slots=True)
class FlatBlocks:
    """The KV blocks of all rows in one list. The work scales with the length of this list, not with the longest row.

    List entries are groups of neighboring blocks, in any order. Blocks that are not visible to any query in their row
    may be omitted. If no block has two owners, the list may instead describe the first blocks of the KV cache in order,
    with one block per entry, so that kernels read these blocks in place. Blocks without an owner are then padding.
    """

    ids: torch.Tensor | None
    """int32 block IDs, entry by entry. Padding uses block 0, including the padding within an incomplete entry. None if
    entry n is block n."""
    rows_N: torch.Tensor
    """int32: the batch row that owns the entry. Padding has index B, which is not a valid row."""
    index_N: torch.Tensor
    """int32: index of the entry's first block in its row's table. The first key is at `index_N * block_size`."""

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> FlatBlocks:
        """Create an instance from an element of `Blocks.flat`."""
        return cls(packed[:-2].flatten() if len(packed) > 2 else None, packed[-2], packed[-1])

    @property
    def group_size(self) -> int:
        """Number of blocks per entry."""
        return 1 if self.ids is None else len(self.ids) // len(self.rows_N)


class Packed(NamedTuple):
    """The real tokens in a padded batch. Devices that do not compile a graph per shape compute only these."""

    index_T: torch.Tensor
    """int64: index of each real token in the flattened padded batch."""
    num_real_B: torch.Tensor
    """int32: number of real tokens in each row."""

    @classmethod
    def from_counts(cls, num_real_B: torch.Tensor, num_queries: int) -> Packed | None:
        """Return the packing, or None if all tokens are real or none are (as in warm-up)."""
        # These tensors are on the host, where summing a list is ten times faster than computing the index.
        if sum(num_real_B.tolist()) in (0, len(num_real_B) * num_queries):
            return None
        offsets_Q = torch.arange(num_queries, dtype=torch.int32)
        return cls((offsets_Q < num_real_B[:, None]).flatten().nonzero().flatten(), num_real_B)

    def spread(self, states: torch.Tensor, num_positions: int) -> torch.Tensor:
        """Scatter packed hidden states to their positions in the padded batch, and fill padding with zeros."""
        return states.new_zeros(num_positions, *states.shape[1:]).index_copy_(0, self.index_T, states)


class SpanRows(NamedTuple):
    rows_S: torch.Tensor
    """int64: batch row that contains each span."""
    firsts_S: torch.Tensor
    """int32: position of each span's first token, which may be in an earlier chunk."""
    lasts_S: torch.Tensor
    """int32: position of each span's last token."""


class Spans(NamedTuple):
    """Spans of tokens that attend to each other bidirectionally, such as an image's tokens in some models.

    A query within a span also attends to later keys in that span. No span is longer than the sliding window, and all
    keys in a span are written before its queries attend.
    """

    lasts_BQ: torch.Tensor
    """int32: last position in the span that contains the query, or 0 if there is no such span."""
    rows: SpanRows | None = None
    """None on devices that capture steps, because the number of spans varies between steps. Never empty otherwise."""
    in_windows_only: bool = False
    """Whether spans apply only to layers with a sliding window."""


class IndexQueries(NamedTuple):
    """Index queries, with which a layer scores keys to select some of them. I: index heads. R: elements per head.

    All heads share one key per token. A key's score is the weighted sum of its dot products with the heads' queries, in
    which negative dot products count as zero.
    """

    query_TIR: torch.Tensor
    weights_TI: torch.Tensor
    """float32."""

    def spread(self, packed: Packed, num_positions: int) -> IndexQueries:
        return IndexQueries(*(packed.spread(tensor, num_positions) for tensor in self))


@dataclass(slots=True, kw_only=True)
class AttentionCall:
    """Paged attention for a padded batch of B rows with Q queries each, in prefill or decode.

    Query q in row b is at position starts_B[b] + q. It attends to the keys up to that position or, if the layer is not
    causal, to the keys of all real queries in the row. Results for padding queries are ignored, and keys of padding are
    written to the pad block.
    """

    num_rows: int
    num_queries: int
    starts_B: torch.Tensor
    """int32: position of each row's first query."""
    block_table_BW: torch.Tensor
    """int32: block IDs for each row. Block 0 is used for padding."""
    num_real_B: torch.Tensor | None = None
    """int32: number of real queries in each row. Causal layers do not use this value."""
    packed: Packed | None = None
    """Indices of the real queries in row order, if the call contains no padding queries."""
    flat: FlatBlocks | None = None
    """The same blocks as one list, for backends that attend over a flat list."""
    host_lengths_B: torch.Tensor | None = None
    """int32 in host memory, for backends that need it: an upper bound on the number of keys visible to each row.

    The exact numbers can be computed from `starts_B`.
    """
    host_counts_B: torch.Tensor | None = None
    """int32 in host memory, for prompt chunks: number of queries in each row, with which `host_lengths_B` is exact.

    A head may process only the last part of a chunk, which starts after the same number of keys.
    """
    spans: Spans | None = None
    """Spans in prompt chunks. Decodes need none, because an image's last token has no later token in its span."""
    from_start: bool = False
    """Whether every row's first query is at position 0."""
    fresh_kv: tuple[torch.Tensor, ...] = ()
    """Keys and values of the queries, [T, K, D] each, if `from_start` is set and the KV cache stores them unchanged."""
    index: IndexQueries | None = None
    """Index queries, which a layer sets to select keys. They are None in the call that all layers share."""
    _plans: dict[Any, Any] = field(default_factory=dict)

    def plan(self, key: Any, build: Callable[[], Any]) -> Any:
        """Return the plan cached under `key`. A kernel builds the plan once for all layers with the same spec."""
        if key not in self._plans:
            self._plans[key] = build()
        return self._plans[key]

    def replace_index(self, index: IndexQueries | None) -> AttentionCall:
        """Return a copy of this call with a layer's index queries. The copy shares the cached plans."""
        return self if index is self.index else replace(self, index=index)

    @property
    def selection(self) -> torch.Tensor | None:
        """Return the selection made by the most recent layer with an indexer, for later layers that reuse it."""
        return self._plans.get("selection")

    def keep_selection(self, selection: torch.Tensor) -> None:
        self._plans["selection"] = selection


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCall:
    """Description of a padded batch for layers with a recurrent state."""

    rows_B: torch.Tensor
    """int64: request-state rows, which index the recurrent states. Padding uses the pad row."""
    starts_B: torch.Tensor
    """int32: position of each row's first token."""
    num_real_B: torch.Tensor
    """int32: number of real tokens in each row."""
    num_pending_B: torch.Tensor
    """int32: number of earlier tokens that are stored separately because the row's state does not include them yet."""
    num_queries: int
    commits: bool
    """Whether to add the real tokens to the state. Otherwise, they stay pending, because drafts may be rejected."""
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


# --- forward pass ---


NO_MEDIA = 0
"""Media-store row for tokens that do not belong to an image. This row is never read."""


class MultimodalInputs(NamedTuple):
    """Changes that images, video and audio make to a forward pass's tokens. D: dimensions of a rotary position."""

    embeddings: Sequence[torch.Tensor] = ()
    """[n, H] for each encoded item, in the order of the tokens that its embeddings replace."""
    is_media_T: torch.Tensor | None = None
    """bool: the tokens that `embeddings` replace, or None if there are none."""
    rows_T: torch.Tensor | None = None
    """int64: each token's row in the media store. On devices that capture steps, it replaces the two fields above."""
    rotary_DT: torch.Tensor | None = None
    """int64: positions for rotary embeddings, if they differ from the token positions."""
    spans: Spans | None = None
    """Image spans, for models that attend to images bidirectionally."""

    @property
    def has_embeddings(self) -> bool:
        return bool(self.embeddings) or self.rows_T is not None

    def pack(self, index_T: torch.Tensor) -> MultimodalInputs:
        """Keep only the real tokens, which include all media tokens."""
        if self.is_media_T is None:
            return self
        return self._replace(is_media_T=self.is_media_T.index_select(0, index_T))


@dataclass(frozen=True, slots=True)
class Inputs:
    """Model inputs for T = B * Q tokens, flattened as vLLM's model classes expect."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    """int64 [T] for each KV cache group."""
    calls: tuple[AttentionCall, ...]
    num_real_B: torch.Tensor
    """int32: number of real tokens in each row."""
    adapters_T: torch.Tensor | None = None
    """int32: slot of each token's LoRA adapter, or None without adapters."""
    states: StateCall | None = None
    """Batch description for layers with a recurrent state, or None without such layers."""
    multimodal: MultimodalInputs | None = None
    """Inputs from images, video and audio, or None if the model or batch has none."""
    rotary: torch.Tensor | None = None
    """int64 [T] or [D, T]: positions for rotary embeddings, if they differ from `positions_T`."""
    token_types_T: torch.Tensor | None = None
    """int32: which of two texts each token belongs to, for models that compare two texts."""
    head_layer: int = 0
    """Index of the layer to run, for draft heads whose layers run one at a time."""

    @property
    def call(self) -> AttentionCall | StateCall:
        """Return the batch description that all calls share, which comes from `states` in models without attention."""
        if self.calls:
            return self.calls[0]
        assert self.states is not None
        return self.states

    def mark_real(self) -> torch.Tensor:
        """Return which tokens are real, as bool [T]."""
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
        """Return inputs whose rotary positions are the token positions plus an offset for each row."""
        # Padding gets position 0, where rotary embedding tables begin.
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
    """KV blocks for the rows in a batch, by KV cache group."""

    tables: tuple[torch.Tensor, ...]
    """int32 [B, W]."""
    sizes: tuple[int, ...]
    """Number of tokens per block."""
    flat: tuple[torch.Tensor, ...] = ()
    """int32 [group size + 2, N], or [2, N] without block IDs: the stacked fields of `FlatBlocks`, for devices that
    decode over a flat block list."""
    lengths_B: torch.Tensor | None = None
    """int32 in host memory, for devices that need it: an upper bound on each row's KV length when the graph ends."""
    counts_B: torch.Tensor | None = None
    """int32 in host memory, for prompt chunks: number of tokens in each row, with which `lengths_B` is exact."""


def build_rectangle(
    tokens_BQ: torch.Tensor,
    starts_B: torch.Tensor,
    num_real_B: torch.Tensor,
    blocks: Blocks,
    row_operations: RowOperations,
) -> Inputs:
    """Build rows of Q consecutive positions starting at `starts_B`, of which the first `num_real_B` are real tokens.

    Padding is token 0 at position 0, because rotary tables end at the model's last position. Padding is written to the
    pad block (block 0), which is never read. Each padding token gets its own slot as long as the block has enough
    slots, because some kernels do not support writing a slot twice in one call.
    """
    tokens_T, positions_T, slots = row_operations.locate_rectangle(
        tokens_BQ, starts_B, num_real_B, blocks.tables, blocks.sizes
    )
    calls = _calls(tokens_BQ.shape[1], starts_B, num_real_B, blocks)
    return Inputs(tokens_T, positions_T, slots, calls, num_real_B)


def build_columns(
    starts_B: torch.Tensor, num_real_B: torch.Tensor, num_columns: int, blocks: Blocks, row_operations: RowOperations
) -> list[Inputs]:
    """Build a padded batch as columns with one query per row, which run one after another.

    Token IDs are 0 until the caller sets them. Data shared by the columns is computed only once.
    """
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

"""Paged attention over a flat list of KV blocks, which reads each block once regardless of the number of queries.

The dimension letters are the same as in padded.py, except that N also counts list entries. An entry consists of one or
more blocks (`choose_group`), and S is then the number of keys per entry. Only queries in the row that owns an entry
attend to that entry. The softmax uses each row's maximum score, and results are summed over the row's entries. To bound
memory use, a long list is read in slices, and each row's maximum and sums are carried from one slice to the next.

Gathering blocks reads and writes their KV before the matmuls read it again. If no block has two owners, the list covers
the first blocks of the cache instead, and matmuls read them in place.

Intel's PyTorch bridge has the operator `block_softmax`, but vllm-gaudi disables it on every card. This project has not
run the operator with several queries per row or with float32 scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec, FlatBlocks
from vllm_gaudi_spec.attention.operations import VLLMKVCache, finite
from vllm_gaudi_spec.attention.padded import (
    LOWEST,
    compute_query_positions,
    convert_for_matmul,
    expand_per_head,
    group_queries,
    is_in_reach,
    multiply,
    reshape_by_token,
    score,
    weigh,
)
from vllm_gaudi_spec.attention.selection import group_index_queries, score_keys, select


@dataclass(frozen=True, slots=True)
class _Plan:
    """Data shared by layers with the same mask during one attention call."""

    seen: torch.Tensor
    """bool [N, 1, 1, Q, S]: the keys in an entry to which each query attends."""
    readers_N: torch.Tensor
    """The batch row whose queries attend to each entry. Padding belongs to an extra last row with an ignored result."""
    owned_N1: torch.Tensor


def attend(
    query_THD: torch.Tensor,
    keys_NSKD: torch.Tensor,
    values_NSKD: torch.Tensor | None,
    call: AttentionCall,
    spec: AttentionLayerSpec,
) -> torch.Tensor:
    """Compute attention over the listed blocks. Returns [T, H, output size].

    Blocks may be views with any strides. All listed blocks must be finite, including the pad block. `values_NSKD` is
    None if values are part of the keys. A query without visible keys gets a result of zero.
    """
    flat = call.flat
    assert flat is not None, "the call lists no blocks"
    assert call.spans is None, "of prompts, which are not listed"
    plan = call.plan(("flat", spec.mask_key), lambda: _make_plan(call, spec))
    # One matmul sums the entries of all rows, so a NaN in one row would spread to all of them.
    query = finite(group_queries(query_THD, call, spec))
    num_entries, size = len(flat.rows_N), flat.group_size
    # The padding of incomplete entries must not add another slice.
    length = SLICE if size == 1 else max(SLICE * 33 // (32 * size), 1)
    slices = [range(begin, min(begin + length, num_entries)) for begin in range(0, num_entries, length)]

    def fetch(entries: range) -> torch.Tensor:
        return _fetch(keys_NSKD, spec.operations.k_cache, flat, entries)

    if spec.num_selected is not None:
        if len(slices) == 1:
            keys = fetch(slices[0])
            fetch = lambda entries: keys  # noqa: E731
        plan = _apply_selection(plan, fetch, slices, call, spec)
    sums: _Sums | None = None
    for entries in slices:
        found = _attend_slice(query, fetch(entries), values_NSKD, entries, plan, sums, call, spec)
        sums = found if sums is None else found.plus(sums)
    assert sums is not None
    group = spec.num_heads // spec.num_kv_heads
    shape = (call.num_rows, spec.num_kv_heads, group, call.num_queries)
    weights = sums.weights_BL.view(shape)
    if spec.sinks_H is not None:
        # Each row counts its sinks once. If a sink far exceeds the row's maximum, its weight is inf and the result 0.
        row_max = sums.row_max[:-1].view(shape) * sums.scale
        weights = weights + torch.exp(expand_per_head(spec.sinks_H, spec).squeeze(-1) - row_max)
    # A row's maximum score adds 1 to the sum. Only queries without visible keys have a smaller sum; their result is 0.
    result = sums.total.view(*shape, spec.output_size).float() / weights.clamp(min=1.0).unsqueeze(-1)
    return reshape_by_token(result, spec)


SLICE = 4096
"""The number of KV blocks to read at once.

With 32 heads, 4 queries per row and 128-token blocks, the float32 scores for a slice take 256 MiB, and several copies
of these scores exist at a time. The gathered bfloat16 keys for 8 heads of size 128 take 1 GiB.
"""


_MOST_BLOCKS = 8
"""The maximum number of blocks in an entry. Eight blocks have 1024 keys, which one matmul processes."""


@cache
def choose_group(num_blocks: int, num_rows: int, most_left_over: int = 1) -> int:
    """Return the number of neighboring blocks per entry, which is a power of two.

    With few queries, a matrix engine multiplies several blocks in about the same time as one. However, each row may
    leave up to `most_left_over` entries incomplete, and gathering takes longer than multiplying. Padding is therefore
    limited to 1/32 of the list.
    """
    size = 1
    while size < _MOST_BLOCKS and (2 * size - 1) * most_left_over * num_rows * 32 <= num_blocks:
        size *= 2
    return size


def _fetch(stored_NSKD: torch.Tensor, cache: VLLMKVCache, flat: FlatBlocks, entries: range) -> torch.Tensor:
    """Return entries as a view [N, K, S, D]."""
    if flat.ids is None:
        return _cut(stored_NSKD, entries).transpose(1, 2)
    size = flat.group_size
    blocks = cache.fetch_from_cache(stored_NSKD, _cut(flat.ids, range(entries.start * size, entries.stop * size)))
    return blocks.unflatten(0, (len(entries), size)).flatten(1, 2).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Running sums over each row's entries. L = K * G * Q is the number of query-head pairs per row."""

    row_max: torch.Tensor
    """float32 [B + 1, L]: maximum score before scaling, with padding in the last row."""
    scale: float
    total: torch.Tensor
    """[B, L * output size]: sum of the weighted values."""
    weights_BL: torch.Tensor

    def plus(self, before: _Sums) -> _Sums:
        """Add the sums over earlier entries, whose maximum score is at most the current one."""
        rescale_BL = torch.exp((before.row_max - self.row_max)[:-1] * self.scale)
        earlier = before.total.float().unflatten(1, (rescale_BL.shape[1], -1)) * rescale_BL[..., None]
        return _Sums(
            self.row_max,
            self.scale,
            self.total.float() + earlier.flatten(1),
            self.weights_BL + before.weights_BL * rescale_BL,
        )


def _attend_slice(
    query: torch.Tensor,
    keys: torch.Tensor,
    values_NSKD: torch.Tensor | None,
    entries: range,
    plan: _Plan,
    before: _Sums | None,
    call: AttentionCall,
    spec: AttentionLayerSpec,
) -> _Sums:
    flat = call.flat
    assert flat is not None
    rows_N = _cut(flat.rows_N, entries)
    values = keys
    if values_NSKD is not None:
        values = _fetch(values_NSKD, spec.operations.v_cache, flat, entries)
    query, matmul = query.index_select(0, _cut(plan.readers_N, entries)), spec.operations.matmul_qk
    if not spec.logits_soft_cap and spec.slopes_H is None:
        # Keep scores in the matmul's output dtype until the maximum is subtracted: the values are the same, and
        # bfloat16 takes half the memory of float32. Round the softmax weights to the input dtype of the next matmul.
        scores, scale = multiply(query, keys, call, spec, matmul), spec.scale
    else:
        scores, scale = score(query, keys, call, spec, matmul), 1.0
    if spec.slopes_H is not None:
        distances = call.plan(
            ("flat distances", spec.block_size), lambda: _compute_distances(call, spec, plan.readers_N)
        )
        scores = scores - _cut(distances, entries) * expand_per_head(spec.slopes_H, spec)
    # Use `where` instead of an additive bias, because pad blocks and unused block ends may contain very large values.
    scores = torch.where(_cut(plan.seen, entries), scores, torch.finfo(scores.dtype).min)
    # Start each row's maximum above the score of masked keys, so that masked keys always have weight 0.
    lanes = spec.num_heads * call.num_queries
    # A Gaudi cannot reduce along a last dimension of size 1.
    by_lane = (lanes,) if lanes > 1 else ()
    row_max = torch.full((call.num_rows + 1, *by_lane), LOWEST / 2, dtype=torch.float32, device=scores.device)
    max_NL = scores.amax(-1).float().view(-1, *by_lane)
    row_max = row_max.index_reduce_(0, rows_N, max_NL, "amax").view(-1, lanes)
    if before is not None:
        row_max = torch.maximum(row_max, before.row_max)
    highest = row_max.index_select(0, rows_N).view(*scores.shape[:-1], 1)
    values = convert_for_matmul(values)
    weights = torch.exp((scores.float() - highest) * scale).to(values.dtype)

    parts = weigh(weights, values, spec, spec.operations.matmul_av).flatten(1)
    total = _cut(_build_one_hot(call, parts.dtype), entries, dim=1) @ parts
    weights_BL = _cut(_build_one_hot(call, torch.float32), entries, dim=1) @ weights.sum(
        -1, dtype=torch.float32
    ).flatten(1)
    return _Sums(row_max, scale, total, weights_BL)


def _apply_selection(
    plan: _Plan,
    fetch: Callable[[range], torch.Tensor],
    slices: Sequence[range],
    call: AttentionCall,
    spec: AttentionLayerSpec,
) -> _Plan:
    """Restrict the plan's mask to the selected keys.

    Index scores are scattered from entries to key positions in each row, and keys are selected there. The selected
    positions are then gathered back to entries.
    """
    assert spec.num_selected is not None
    flat = call.flat
    assert flat is not None
    width = call.block_table_BW.shape[1]
    if width * spec.block_size <= spec.num_selected:
        return plan
    if spec.index_size:
        # Padding is assigned to one extra block after the blocks of all rows.
        num_blocks, size = call.num_rows * width, flat.group_size
        index_NG = flat.index_N[:, None] + torch.arange(size, dtype=torch.int32, device=flat.index_N.device)
        blocks_NG = plan.readers_N[:, None] * width + index_NG
        blocks_NG = torch.where(plan.owned_N1 & (index_NG < width), blocks_NG, num_blocks)
        query, weights = group_index_queries(call)
        shape = (num_blocks + 1, call.num_queries, spec.block_size)
        scores = torch.full(shape, LOWEST, dtype=torch.float32, device=query.device)
        for entries in slices:
            readers_N = _cut(plan.readers_N, entries)
            of_entries = (query.index_select(0, readers_N), weights.index_select(0, readers_N), fetch(entries)[:, 0])
            found = torch.where(_cut(plan.seen, entries)[:, 0, 0], score_keys(*of_entries, spec), LOWEST)
            found = found.unflatten(-1, (size, spec.block_size)).transpose(1, 2).flatten(0, 1)
            scores = scores.index_reduce_(0, _cut(blocks_NG, entries).flatten(), found, "amax")
        by_row = scores[:-1].unflatten(0, (call.num_rows, width)).transpose(1, 2)
        selected = select(by_row.flatten(2), spec.num_selected).unflatten(-1, (width, spec.block_size))
        selected = torch.nn.functional.pad(selected.transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, 1))
        of_entries_NGQS = selected.index_select(0, blocks_NG.flatten()).unflatten(0, blocks_NG.shape)
        call.keep_selection(of_entries_NGQS.transpose(1, 2).flatten(2)[:, None, None])
    assert call.selection is not None, "no layer before it has an indexer"
    return replace(plan, seen=plan.seen & call.selection)


def _cut(tensor: torch.Tensor, entries: range, dim: int = 0) -> torch.Tensor:
    """Return a slice of the entries, or the tensor itself if the slice covers all of them."""
    return tensor if len(entries) == tensor.shape[dim] else tensor.narrow(dim, entries.start, len(entries))


def _make_plan(call: AttentionCall, spec: AttentionLayerSpec) -> _Plan:
    flat = call.flat
    assert flat is not None
    owned_N = flat.rows_N < call.num_rows
    readers_N = flat.rows_N.clamp(max=call.num_rows - 1)
    key_pos, query_pos = _compute_positions(call, spec, readers_N)
    seen_NQS = is_in_reach(key_pos, query_pos, spec) & owned_N[:, None, None]
    if not spec.is_causal:
        assert call.num_real_B is not None
        ends_B = call.starts_B + call.num_real_B
        seen_NQS = seen_NQS & (key_pos < ends_B.index_select(0, readers_N)[:, None, None])
    return _Plan(seen_NQS[:, None, None], readers_N, owned_N[:, None])


def _compute_distances(call: AttentionCall, spec: AttentionLayerSpec, readers_N: torch.Tensor) -> torch.Tensor:
    """Return each query's distance back to each key in an entry, float32 [N, 1, 1, Q, S]."""
    key_pos, query_pos = _compute_positions(call, spec, readers_N)
    return (query_pos - key_pos).float()[:, None, None]


def _compute_positions(
    call: AttentionCall, spec: AttentionLayerSpec, readers_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of each entry's keys, [N, 1, S], and of the queries in its row, [N, Q, 1]."""
    flat = call.flat
    assert flat is not None
    inside_S = torch.arange(flat.group_size * spec.block_size, dtype=torch.int32, device=flat.rows_N.device)
    key_pos_NS = flat.index_N[:, None] * spec.block_size + inside_S
    return key_pos_NS[:, None], compute_query_positions(call.starts_B.index_select(0, readers_N), call.num_queries)


def _build_one_hot(call: AttentionCall, dtype: torch.dtype) -> torch.Tensor:
    """Return the one-hot matrix [B, N] with which a matmul sums each row's entries. Padding entries are all zero."""

    def build() -> torch.Tensor:
        assert call.flat is not None
        rows_B = torch.arange(call.num_rows, dtype=torch.int32, device=call.flat.rows_N.device)
        return (call.flat.rows_N == rows_B[:, None]).to(dtype)

    return call.plan(("one hot", dtype), build)

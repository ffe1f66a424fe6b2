"""Paged attention over a flat list of blocks: each is read once, whatever the number of queries and the longest row.

Letters as in padded.py; N also counts the list's entries. All queries of the row that owns an entry attend to it alone.
A row's entries are then rescaled to their common maximum and added up. A long list is read in slices, between which
each row's maximum and sums are kept, so that memory has a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec
from vllm_gaudi_spec.attention.operations import finite
from vllm_gaudi_spec.attention.padded import (
    LOWEST,
    compute_query_positions,
    expand_per_head,
    group_queries,
    is_in_reach,
    reshape_by_token,
    score,
    weigh,
)
from vllm_gaudi_spec.attention.selection import group_index_queries, score_keys, select


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the layers of a call with one mask share."""

    seen: torch.Tensor
    """bool [N, 1, 1, Q, S]: which keys of an entry a query sees."""
    readers_N: torch.Tensor
    """The row whose queries read the entry. Padding is read by the last row, and ignored."""
    owned_N1: torch.Tensor


def attend(
    query_THD: torch.Tensor,
    keys_NSKD: torch.Tensor,
    values_NSKD: torch.Tensor | None,
    call: AttentionCall,
    spec: AttentionLayerSpec,
) -> torch.Tensor:
    """Attend over listed blocks; returns [T, H, output size].

    Blocks may be views with any strides. The listed blocks must be finite, the pad block included. `values_NSKD` is
    None if values are a part of the keys. The result of a query that sees no key is zero.
    """
    flat = call.flat
    assert flat is not None, "the call lists no blocks"
    assert call.spans is None, "of prompts, which are not listed"
    plan = call.plan(("flat", spec.mask_key), lambda: _make_plan(call, spec))
    # One matmul sums the entries of all rows, so NaN in one row would spread to all.
    query = finite(group_queries(query_THD, call, spec))
    num_entries = len(flat.ids_N)
    slices = [range(begin, min(begin + SLICE, num_entries)) for begin in range(0, num_entries, SLICE)]

    def fetch(entries: range) -> torch.Tensor:
        return spec.operations.k_cache.fetch_from_cache(keys_NSKD, _cut(flat.ids_N, entries)).transpose(1, 2)

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
        # Sinks count once per row. Far above the row's maximum this is inf, which leaves nothing.
        weights = weights + torch.exp(expand_per_head(spec.sinks_H, spec).squeeze(-1) - sums.row_max[:-1].view(shape))
    # The row's maximum adds 1, so a smaller sum is that of a query that sees nothing, whose total is 0.
    result = sums.total.view(*shape, spec.output_size).float() / weights.clamp(min=1.0).unsqueeze(-1)
    return reshape_by_token(result, spec)


SLICE = 4096
"""How many entries are read at once.

With 32 heads, 4 queries per row and blocks of 128 tokens their float32 scores are 256 MiB, of which there are a few
copies; the gathered keys of 8 heads of 128 numbers in bfloat16 are 1 GiB.
"""


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over the entries of each row so far; L = K * G * Q lanes, one per query and head."""

    row_max: torch.Tensor
    """float32 [B + 1, L]; the last row is padding."""
    total: torch.Tensor
    """[B, L * output size]: weighted values."""
    weights_BL: torch.Tensor

    def plus(self, before: _Sums) -> _Sums:
        """Add the sums of earlier entries, whose maximum is not above this one."""
        rescale_BL = torch.exp(before.row_max - self.row_max)[:-1]
        earlier = before.total.float().unflatten(1, (rescale_BL.shape[1], -1)) * rescale_BL[..., None]
        return _Sums(
            self.row_max, self.total.float() + earlier.flatten(1), self.weights_BL + before.weights_BL * rescale_BL
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
    ids_N, rows_N = _cut(flat.ids_N, entries), _cut(flat.rows_N, entries)
    owned_N1 = _cut(plan.owned_N1, entries)
    values = keys
    if values_NSKD is not None:
        values = spec.operations.v_cache.fetch_from_cache(values_NSKD, ids_N).transpose(1, 2)
    scores = score(query.index_select(0, _cut(plan.readers_N, entries)), keys, call, spec, spec.operations.matmul_qk)
    if spec.slopes_H is not None:
        distances = call.plan(
            ("flat distances", spec.block_size), lambda: _compute_distances(call, spec, plan.readers_N)
        )
        scores = scores - _cut(distances, entries) * expand_per_head(spec.slopes_H, spec)
    exp, max_NL, sums_NL = _block_softmax(scores, _cut(plan.seen, entries))

    max_NL = torch.where(owned_N1, max_NL, LOWEST)
    sums_NL = torch.where(owned_N1, sums_NL, 0.0)
    # Start a row's maximum above LOWEST, so that an entry in which a query sees nothing is rescaled to 0 rather than 1,
    # even if the query sees nothing in the row's other entries.
    lanes = spec.num_heads * call.num_queries
    # A Gaudi cannot reduce along a last dimension of 1.
    by_lane = (lanes,) if lanes > 1 else ()
    row_max = torch.full((call.num_rows + 1, *by_lane), LOWEST / 2, dtype=torch.float32, device=scores.device)
    row_max = row_max.index_reduce_(0, rows_N, max_NL.view(-1, *by_lane), "amax").view(-1, lanes)
    if before is not None:
        row_max = torch.maximum(row_max, before.row_max)
    rescale_NL = torch.exp(max_NL - row_max.index_select(0, rows_N))

    parts = weigh(exp * rescale_NL.view(*scores.shape[:-1], 1), values, spec, spec.operations.matmul_av).flatten(1)
    total = _cut(_build_one_hot(call, parts.dtype), entries, dim=1) @ parts
    return _Sums(row_max, total, _cut(_build_one_hot(call, torch.float32), entries, dim=1) @ (sums_NL * rescale_NL))


def _apply_selection(
    plan: _Plan,
    fetch: Callable[[range], torch.Tensor],
    slices: Sequence[range],
    call: AttentionCall,
    spec: AttentionLayerSpec,
) -> _Plan:
    """Restrict the plan to selected keys.

    Scores of entries are put at the positions of their keys in their rows, the selection is made there, and taken back
    to entries.
    """
    assert spec.num_selected is not None
    flat = call.flat
    assert flat is not None
    width = call.block_table_BW.shape[1]
    if width * spec.block_size <= spec.num_selected:
        return plan
    if spec.index_size:
        # Padding has its own block, after those of all rows.
        num_blocks = call.num_rows * width
        blocks_N = torch.where(plan.owned_N1[:, 0], plan.readers_N * width + flat.index_N, num_blocks)
        query, weights = group_index_queries(call)
        shape = (num_blocks + 1, call.num_queries, spec.block_size)
        scores = torch.full(shape, LOWEST, dtype=torch.float32, device=query.device)
        for entries in slices:
            readers_N = _cut(plan.readers_N, entries)
            of_entries = (query.index_select(0, readers_N), weights.index_select(0, readers_N), fetch(entries)[:, 0])
            found = torch.where(_cut(plan.seen, entries)[:, 0, 0], score_keys(*of_entries, spec), LOWEST)
            scores = scores.index_reduce_(0, _cut(blocks_N, entries), found, "amax")
        by_row = scores[:-1].unflatten(0, (call.num_rows, width)).transpose(1, 2)
        selected = select(by_row.flatten(2), spec.num_selected).unflatten(-1, (width, spec.block_size))
        selected = torch.nn.functional.pad(selected.transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, 1))
        call.keep_selection(selected.index_select(0, blocks_N)[:, None, None])
    assert call.selection is not None, "no layer before it has an indexer"
    return replace(plan, seen=plan.seen & call.selection)


def _cut(tensor: torch.Tensor, entries: range, dim: int = 0) -> torch.Tensor:
    """Slice entries; the tensor itself if these are all, so that a short list costs no operation."""
    return tensor if len(entries) == tensor.shape[dim] else tensor.narrow(dim, entries.start, len(entries))


def _block_softmax(scores: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return exp(scores - max), and max and sums [N, L], for each entry alone.

    The bridge has an operator `block_softmax`, but vllm-gaudi disables it on every card, and it has not been run with
    several queries per row or float32 scores.
    """
    # Select instead of adding a bias: pad blocks and unused ends of blocks may hold numbers too large to add to.
    scores = torch.where(seen, scores, LOWEST)
    block_max = scores.amax(-1, keepdim=True)
    exp = torch.exp(scores - block_max)
    return exp, block_max.flatten(1), exp.sum(-1).flatten(1)


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
    """Return how far each key of an entry is before a query, float32 [N, 1, 1, Q, S]."""
    key_pos, query_pos = _compute_positions(call, spec, readers_N)
    return (query_pos - key_pos).float()[:, None, None]


def _compute_positions(
    call: AttentionCall, spec: AttentionLayerSpec, readers_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of an entry's keys [N, 1, S], and of the queries that read it [N, Q, 1]."""
    flat = call.flat
    assert flat is not None
    inside_S = torch.arange(spec.block_size, dtype=torch.int32, device=flat.ids_N.device)
    key_pos_NS = flat.index_N[:, None] * spec.block_size + inside_S
    return key_pos_NS[:, None], compute_query_positions(call.starts_B.index_select(0, readers_N), call.num_queries)


def _build_one_hot(call: AttentionCall, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix [B, N] that sums the entries of each row. Padding belongs to no row."""

    def build() -> torch.Tensor:
        assert call.flat is not None
        rows_B = torch.arange(call.num_rows, dtype=torch.int32, device=call.flat.rows_N.device)
        return (call.flat.rows_N == rows_B[:, None]).to(dtype)

    return call.plan(("one hot", dtype), build)

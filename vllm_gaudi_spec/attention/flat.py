"""Paged attention over a flat list of blocks: each is read once, whatever the number of queries and the longest row.

The letters are padded.py's; N here also counts the list's entries. Every entry is attended to on its own, by all
queries of the row that owns it. A row's entries are then rescaled to their common maximum and added up. A long list is
read in slices, of which each row keeps its maximum and its sums so far: what a layer needs at once has a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec
from vllm_gaudi_spec.attention.operations import PLAIN, Operations, finite
from vllm_gaudi_spec.attention.padded import (
    LOWEST,
    by_head,
    by_token,
    group_queries,
    in_reach,
    query_positions,
    score,
    weigh,
)
from vllm_gaudi_spec.attention.selection import index_scores, queries_by_row, select


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a call's layers with one mask share."""

    seen: torch.Tensor
    """bool [N, 1, 1, Q, S]: which keys of an entry a query sees."""
    readers_N: torch.Tensor
    """The row whose queries read the entry. The last row reads padding, which no row counts."""
    owned_N1: torch.Tensor


def attend(
    query_THD: torch.Tensor,
    keys_NSKD: torch.Tensor,
    values_NSKD: torch.Tensor | None,
    call: AttentionCall,
    spec: AttentionLayerSpec,
    operations: Operations = PLAIN,
) -> torch.Tensor:
    """[T, H, output size]. Blocks may be views with any strides. What the listed blocks hold must be finite, the
    pad block included.

    `values_NSKD`: None where they are a part of the keys. A query that sees no key of the listed blocks comes out zero.
    """
    flat = call.flat
    assert flat is not None, "the call lists no blocks"
    assert call.spans is None, "of prompts, which are not listed"
    assert spec.is_causal, "of prompts that are computed whole, which are not listed"
    plan = call.plan(("flat", spec.mask_key), lambda: _plan(call, spec))
    # Entries of all rows meet in one matmul, where NaN of one row would be NaN of all.
    query = finite(group_queries(query_THD, call, spec))
    num_entries = len(flat.ids_N)
    slices = [range(begin, min(begin + SLICE, num_entries)) for begin in range(0, num_entries, SLICE)]

    def fetch(entries: range) -> torch.Tensor:
        return operations.k_cache.fetch_from_cache(keys_NSKD, _cut(flat.ids_N, entries)).transpose(1, 2)

    if spec.num_selected is not None:
        if len(slices) == 1:
            keys = fetch(slices[0])
            fetch = lambda entries: keys  # noqa: E731
        plan = _with_selection(plan, fetch, slices, call, spec)
    sums: _Sums | None = None
    for entries in slices:
        found = _attend_slice(query, fetch(entries), values_NSKD, entries, plan, sums, call, spec, operations)
        sums = found if sums is None else found.plus(sums)
    assert sums is not None
    group = spec.num_heads // spec.num_kv_heads
    shape = (call.num_rows, spec.num_kv_heads, group, call.num_queries)
    weights = sums.weights_BL.view(shape)
    if spec.sinks_H is not None:
        # Once a row, whatever the number of its entries. Far above the row's maximum it is inf, which leaves nothing.
        weights = weights + torch.exp(by_head(spec.sinks_H, spec).squeeze(-1) - sums.row_max[:-1].view(shape))
    # The row's maximum itself counts 1: a smaller sum is that of a query that sees nothing, whose total is 0.
    result = sums.total.view(*shape, spec.output_size).float() / weights.clamp(min=1.0).unsqueeze(-1)
    return by_token(result, spec)


SLICE = 4096
"""Entries that are read at once. With 32 heads, 4 queries a row and blocks of 128 tokens their float32 scores are
256 MiB, of which there are a few copies; and the gathered keys of 8 heads of 128 numbers in bfloat16 are 1 GiB."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of all entries of each row so far; L = K * G * Q lanes, one a query of a head."""

    row_max: torch.Tensor
    """float32 [B + 1, L]; the last row is of padding."""
    total: torch.Tensor
    """[B, L * output size]: values by weight."""
    weights_BL: torch.Tensor

    def plus(self, before: _Sums) -> _Sums:
        """With the sums of earlier entries, whose maximum is not above this one."""
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
    operations: Operations,
) -> _Sums:
    flat = call.flat
    assert flat is not None
    ids_N, rows_N = _cut(flat.ids_N, entries), _cut(flat.rows_N, entries)
    owned_N1 = _cut(plan.owned_N1, entries)
    values = keys
    if values_NSKD is not None:
        values = operations.v_cache.fetch_from_cache(values_NSKD, ids_N).transpose(1, 2)
    scores = score(query.index_select(0, _cut(plan.readers_N, entries)), keys, call, spec, operations.matmul_qk)
    if spec.slopes_H is not None:
        distances = call.plan(("flat distances", spec.block_size), lambda: _distances(call, spec, plan.readers_N))
        scores = scores - _cut(distances, entries) * by_head(spec.slopes_H, spec)
    exp, max_NL, sums_NL = _block_softmax(scores, _cut(plan.seen, entries))

    max_NL = torch.where(owned_N1, max_NL, LOWEST)
    sums_NL = torch.where(owned_N1, sums_NL, 0.0)
    # A row's maximum starts above LOWEST, so that an entry of which a query sees nothing is rescaled to 0, not to 1,
    # even where the query sees nothing in the row's other entries either.
    lanes = spec.num_heads * call.num_queries
    # A Gaudi reduces no last dimension of 1.
    by_lane = (lanes,) if lanes > 1 else ()
    row_max = torch.full((call.num_rows + 1, *by_lane), LOWEST / 2, dtype=torch.float32, device=scores.device)
    row_max = row_max.index_reduce_(0, rows_N, max_NL.view(-1, *by_lane), "amax").view(-1, lanes)
    if before is not None:
        row_max = torch.maximum(row_max, before.row_max)
    rescale_NL = torch.exp(max_NL - row_max.index_select(0, rows_N))

    parts = weigh(exp * rescale_NL.view(*scores.shape[:-1], 1), values, spec, operations.matmul_av).flatten(1)
    total = _cut(_one_hot(call, parts.dtype), entries, dim=1) @ parts
    return _Sums(row_max, total, _cut(_one_hot(call, torch.float32), entries, dim=1) @ (sums_NL * rescale_NL))


def _with_selection(
    plan: _Plan,
    fetch: Callable[[range], torch.Tensor],
    slices: Sequence[range],
    call: AttentionCall,
    spec: AttentionLayerSpec,
) -> _Plan:
    """The plan with selected keys alone. Scores of entries are put where their keys are in their rows, selected from,
    and what is selected is taken back."""
    assert spec.num_selected is not None
    flat = call.flat
    assert flat is not None
    width = call.block_table_BW.shape[1]
    if width * spec.block_size <= spec.num_selected:
        return plan
    if spec.index_size:
        # Padding has a block of its own after those of all rows.
        num_blocks = call.num_rows * width
        blocks_N = torch.where(plan.owned_N1[:, 0], plan.readers_N * width + flat.index_N, num_blocks)
        query, weights = queries_by_row(call)
        shape = (num_blocks + 1, call.num_queries, spec.block_size)
        scores = torch.full(shape, LOWEST, dtype=torch.float32, device=query.device)
        for entries in slices:
            readers_N = _cut(plan.readers_N, entries)
            of_entries = (query.index_select(0, readers_N), weights.index_select(0, readers_N), fetch(entries)[:, 0])
            found = torch.where(_cut(plan.seen, entries)[:, 0, 0], index_scores(*of_entries, spec), LOWEST)
            scores = scores.index_reduce_(0, _cut(blocks_N, entries), found, "amax")
        by_row = scores[:-1].unflatten(0, (call.num_rows, width)).transpose(1, 2)
        selected = select(by_row.flatten(2), spec.num_selected).unflatten(-1, (width, spec.block_size))
        selected = torch.nn.functional.pad(selected.transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, 1))
        call.keep_selection(selected.index_select(0, blocks_N)[:, None, None])
    assert call.selection is not None, "no layer before it has an indexer"
    return replace(plan, seen=plan.seen & call.selection)


def _cut(tensor: torch.Tensor, entries: range, dim: int = 0) -> torch.Tensor:
    """The tensor itself where these are all entries: a short list costs no operation more."""
    return tensor if len(entries) == tensor.shape[dim] else tensor.narrow(dim, entries.start, len(entries))


def _block_softmax(scores: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """exp(scores - max), max and sums, of each entry on its own; the last two are [N, L].

    In plain torch. The bridge has an operation `block_softmax`; vllm-gaudi has it off on every card, and nobody has
    run it with several queries a row or with float32 scores.
    """
    # No bias is added: the pad block and the unused end of a block may hold numbers that are too large for a sum.
    scores = torch.where(seen, scores, LOWEST)
    block_max = scores.amax(-1, keepdim=True)
    exp = torch.exp(scores - block_max)
    return exp, block_max.flatten(1), exp.sum(-1).flatten(1)


def _plan(call: AttentionCall, spec: AttentionLayerSpec) -> _Plan:
    flat = call.flat
    assert flat is not None
    owned_N = flat.rows_N < call.num_rows
    readers_N = flat.rows_N.clamp(max=call.num_rows - 1)
    key_pos, query_pos = _positions(call, spec, readers_N)
    seen_NQS = in_reach(key_pos, query_pos, spec) & owned_N[:, None, None]
    return _Plan(seen_NQS[:, None, None], readers_N, owned_N[:, None])


def _distances(call: AttentionCall, spec: AttentionLayerSpec, readers_N: torch.Tensor) -> torch.Tensor:
    """float32 [N, 1, 1, Q, S]: how far a key of an entry is before a query."""
    key_pos, query_pos = _positions(call, spec, readers_N)
    return (query_pos - key_pos).float()[:, None, None]


def _positions(
    call: AttentionCall, spec: AttentionLayerSpec, readers_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of an entry's keys [N, 1, S], and of the queries that read it [N, Q, 1]."""
    flat = call.flat
    assert flat is not None
    inside_S = torch.arange(spec.block_size, dtype=torch.int32, device=flat.ids_N.device)
    key_pos_NS = flat.index_N[:, None] * spec.block_size + inside_S
    return key_pos_NS[:, None], query_positions(call.starts_B.index_select(0, readers_N), call.num_queries)


def _one_hot(call: AttentionCall, dtype: torch.dtype) -> torch.Tensor:
    """[B, N]: multiplied with entries, it sums those of each row. Padding belongs to no row."""

    def build() -> torch.Tensor:
        assert call.flat is not None
        rows_B = torch.arange(call.num_rows, dtype=torch.int32, device=call.flat.rows_N.device)
        return (call.flat.rows_N == rows_B[:, None]).to(dtype)

    return call.plan(("one hot", dtype), build)

"""Paged attention over block tables, in which each row's KV is gathered and padded to the length of the longest row.

Dimensions: B rows of Q queries; H query heads in K groups of G, one group per KV head; D head size; N blocks of S keys.
Shapes are static, and the host reads no values.
"""

from __future__ import annotations

import torch

from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec
from vllm_gaudi_spec.attention.operations import PLAIN, Matmul, VLLMKVCache
from vllm_gaudi_spec.attention.selection import group_index_queries, score_keys, select

# The score of a masked key. It is finite, because inf - inf would be NaN for a query without visible keys.
LOWEST = torch.finfo(torch.float32).min
_NO_WINDOW = 1 << 30  # positions are int32


def attend(
    query_THD: torch.Tensor,
    keys_NSKD: torch.Tensor,
    values_NSKD: torch.Tensor | None,
    call: AttentionCall,
    spec: AttentionLayerSpec,
) -> torch.Tensor:
    """Compute attention over block tables. Returns [T, H, output size].

    Blocks may be views with any strides. All listed blocks must be finite, including the pad block. `values_NSKD` is
    None if values are part of the keys. A query without visible keys gets a result of zero.
    """

    def build() -> tuple[torch.Tensor, torch.Tensor]:
        seen_BQ = find_visible(call, spec)
        return seen_BQ[:, None, None], seen_BQ.any(-1)[:, None, None, :, None]

    operations = spec.operations
    seen, sees_any = call.plan(("padded", spec.mask_key), build)
    keys = gather_rows(keys_NSKD, call.block_table_BW, operations.k_cache)
    values = keys if values_NSKD is None else gather_rows(values_NSKD, call.block_table_BW, operations.v_cache)
    if spec.num_selected is not None:
        seen = seen & _selection(keys, seen[:, 0, 0], call, spec)[:, None, None]
    scores = score(group_queries(query_THD, call, spec), keys, call, spec, operations.matmul_qk)
    if spec.slopes_H is not None:
        # [B, 1, 1, Q, keys]
        distances = call.plan(("distances", spec.block_size), lambda: _compute_distances(call, spec)[:, None, None])
        scores = scores - distances * expand_per_head(spec.slopes_H, spec)
    scores = torch.where(seen, scores, LOWEST)
    num_keys = scores.shape[-1]
    if spec.sinks_H is not None:
        sinks = expand_per_head(spec.sinks_H, spec).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    if spec.layer_operations:
        scores = scores.to(spec.dtype)  # INC's softmax expects and returns the model's dtype
    weights = operations.softmax(scores, -1)
    if spec.sinks_H is not None:
        weights = weights[..., :num_keys]
    result = weigh(weights, values, spec, operations.matmul_av)
    return reshape_by_token(torch.where(sees_any, result, 0), spec)


def _selection(
    keys: torch.Tensor, seen_BQ: torch.Tensor, call: AttentionCall, spec: AttentionLayerSpec
) -> torch.Tensor:
    """Return the keys in the block table that each query selects, bool [B, Q, W * S]. Small tables are kept whole."""
    assert spec.num_selected is not None
    if seen_BQ.shape[-1] <= spec.num_selected:
        return seen_BQ
    if spec.index_size:
        scores = score_keys(*group_index_queries(call), keys.squeeze(1), spec)
        call.keep_selection(select(torch.where(seen_BQ, scores, LOWEST), spec.num_selected))
    assert call.selection is not None, "no layer before it has an indexer"
    return call.selection


def gather_rows(blocks_NSKD: torch.Tensor, table_BW: torch.Tensor, cache: VLLMKVCache = PLAIN.k_cache) -> torch.Tensor:
    """Gather each row's blocks one after another and return them as a view [B, K, W * S, D]."""
    rows, width = table_BW.shape
    _, block_size, num_kv_heads, head_size = blocks_NSKD.shape
    gathered = cache.fetch_from_cache(blocks_NSKD, table_BW.flatten())
    return gathered.view(rows, width * block_size, num_kv_heads, head_size).transpose(1, 2)


def find_visible(call: AttentionCall, spec: AttentionLayerSpec) -> torch.Tensor:
    """Return the keys in the block table that are visible to each query, bool [B, Q, W * S]."""
    keys, queries = _key_positions(call, spec), compute_query_positions(call.starts_B, call.num_queries)
    seen = is_in_reach(keys, queries, spec)
    if not spec.is_causal:
        assert call.num_real_B is not None
        # Keys after a row's last real key may belong to padding or to other prompts.
        seen = seen & (keys < (call.starts_B + call.num_real_B)[:, None, None])
    if call.spans is None:
        return seen
    return seen | ((keys > queries) & (keys <= call.spans.lasts_BQ[..., None]))


def _compute_distances(call: AttentionCall, spec: AttentionLayerSpec) -> torch.Tensor:
    """Return each query's distance back to each key in the table, float32 [B, Q, W * S]."""
    return (compute_query_positions(call.starts_B, call.num_queries) - _key_positions(call, spec)).float()


def _key_positions(call: AttentionCall, spec: AttentionLayerSpec) -> torch.Tensor:
    num_keys = call.block_table_BW.shape[1] * spec.block_size
    return torch.arange(num_keys, dtype=torch.int32, device=call.starts_B.device)


# --- shared with flat.py ---


def expand_per_head(numbers_H: torch.Tensor, spec: AttentionLayerSpec) -> torch.Tensor:
    """Reshape per-head values to float32 [K, G, 1, 1] to broadcast against scores."""
    return numbers_H.float().view(spec.num_kv_heads, -1, 1, 1)


def compute_query_positions(starts: torch.Tensor, num_queries: int) -> torch.Tensor:
    """Return query positions, [..., Q, 1], for comparison with key positions."""
    offsets_Q = torch.arange(num_queries, dtype=torch.int32, device=starts.device)
    return (starts[:, None] + offsets_Q)[..., None]


def is_in_reach(key_pos: torch.Tensor, query_pos: torch.Tensor, spec: AttentionLayerSpec) -> torch.Tensor:
    """Return the keys that are visible to each query according to positions alone.

    A query attends to the keys up to its own position, within its window or chunk. If the layer is not causal, later
    keys are also visible, within the window if there is one.
    """
    last = query_pos if spec.is_causal else query_pos + (spec.sliding_window or _NO_WINDOW) - 1
    seen = key_pos <= last
    if spec.sliding_window is not None:
        seen = seen & (key_pos > query_pos - spec.sliding_window)
    if spec.attention_chunk is not None:
        seen = seen & (key_pos >= query_pos - query_pos % spec.attention_chunk)
    return seen


def group_queries(query_THD: torch.Tensor, call: AttentionCall, spec: AttentionLayerSpec) -> torch.Tensor:
    """Return queries as [B, K, G * Q, D]. One matmul can then multiply all queries of a KV head by its keys."""
    group = spec.num_heads // spec.num_kv_heads
    query = query_THD.view(call.num_rows, call.num_queries, spec.num_kv_heads, group, spec.head_size)
    shape = (call.num_rows, spec.num_kv_heads, group * call.num_queries, spec.head_size)
    return query.permute(0, 2, 3, 1, 4).reshape(shape)


def score(
    query: torch.Tensor,
    keys: torch.Tensor,
    call: AttentionCall,
    spec: AttentionLayerSpec,
    matmul: Matmul = PLAIN.matmul_qk,
) -> torch.Tensor:
    """Score queries [..., K, G * Q, D] against keys [..., K, keys, D]. Returns float32 [..., K, G, Q, keys]."""
    products = multiply(query, keys, call, spec, matmul).float()
    # Scale after the matmul, because scaling bfloat16 queries before it would round them again.
    if spec.logits_soft_cap:
        products = torch.tanh(products * (spec.scale / spec.logits_soft_cap)) * spec.logits_soft_cap
    else:
        products = products * spec.scale
    return products


def multiply(
    query: torch.Tensor, keys: torch.Tensor, call: AttentionCall, spec: AttentionLayerSpec, matmul: Matmul
) -> torch.Tensor:
    """Return the dot products before `score` scales them, in the matmul's output dtype."""
    products = matmul(convert_for_matmul(query), convert_for_matmul(keys).transpose(-1, -2))
    group = spec.num_heads // spec.num_kv_heads
    return products.view(*products.shape[:-2], group, call.num_queries, keys.shape[-2])


def weigh(
    weights: torch.Tensor, values: torch.Tensor, spec: AttentionLayerSpec, matmul: Matmul = PLAIN.matmul_av
) -> torch.Tensor:
    """Sum values [..., K, keys, D] using weights [..., K, G, Q, keys]. Returns [..., K, G, Q, output size]."""
    values = convert_for_matmul(values)
    summed = matmul(weights.to(values.dtype).flatten(-3, -2), values)
    # If values are part of the keys, multiply by whole keys, because slicing the keys would copy all of them.
    return summed[..., : spec.output_size].unflatten(-2, weights.shape[-3:-1])


def convert_for_matmul(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to a dtype for matmuls: keep bfloat16, and use float32 otherwise because float16 could overflow."""
    return tensor if tensor.dtype == torch.bfloat16 else tensor.float()


def reshape_by_token(result_BKGQD: torch.Tensor, spec: AttentionLayerSpec) -> torch.Tensor:
    """Return results as [T, H, output size] in the layer's dtype."""
    return result_BKGQD.permute(0, 3, 1, 2, 4).to(spec.dtype).reshape(-1, spec.num_heads, spec.output_size)

"""Paged attention over block tables: every row is gathered as wide as the widest, one softmax a query.

B rows of Q queries; H query heads in K groups of G, one a KV head; D head size; N blocks of S keys. Shapes are static,
and no value is read on the host.
"""

from __future__ import annotations

import torch

from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec
from vllm_gaudi_spec.attention.operations import PLAIN, Matmul, Operations, VLLMKVCache
from vllm_gaudi_spec.attention.selection import index_scores, queries_by_row, select

# The score of a key that a query may not read. Finite, since inf - inf is nan where a query sees no key at all.
LOWEST = torch.finfo(torch.float32).min
_NO_WINDOW = 1 << 30  # positions are int32


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

    `values_NSKD`: None where they are a part of the keys. A query that sees no key of its table comes out zero.
    """

    def build() -> tuple[torch.Tensor, torch.Tensor]:
        seen_BQ = visible(call, spec)
        return seen_BQ[:, None, None], seen_BQ.any(-1)[:, None, None, :, None]

    seen, sees_any = call.plan(("padded", spec.mask_key), build)
    keys = gather_rows(keys_NSKD, call.block_table_BW, operations.k_cache)
    values = keys if values_NSKD is None else gather_rows(values_NSKD, call.block_table_BW, operations.v_cache)
    if spec.num_selected is not None:
        seen = seen & _selection(keys, seen[:, 0, 0], call, spec)[:, None, None]
    scores = score(group_queries(query_THD, call, spec), keys, call, spec, operations.matmul_qk)
    if spec.slopes_H is not None:
        # [B, 1, 1, Q, keys]
        distances = call.plan(("distances", spec.block_size), lambda: _distances(call, spec)[:, None, None])
        scores = scores - distances * by_head(spec.slopes_H, spec)
    scores = torch.where(seen, scores, LOWEST)
    num_keys = scores.shape[-1]
    if spec.sinks_H is not None:
        sinks = by_head(spec.sinks_H, spec).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    if spec.layer_operations:
        scores = scores.to(spec.dtype)  # replacements of the softmax take and return the model's dtype
    weights = operations.softmax(scores, -1)
    if spec.sinks_H is not None:
        weights = weights[..., :num_keys]
    result = weigh(weights, values, spec, operations.matmul_av)
    return by_token(torch.where(sees_any, result, 0), spec)


def _selection(
    keys: torch.Tensor, seen_BQ: torch.Tensor, call: AttentionCall, spec: AttentionLayerSpec
) -> torch.Tensor:
    """bool [B, Q, W * S]: which keys of its table a query selects, or those it sees where a table has no more."""
    assert spec.num_selected is not None
    if seen_BQ.shape[-1] <= spec.num_selected:
        return seen_BQ
    if spec.index_size:
        scores = index_scores(*queries_by_row(call), keys.squeeze(1), spec)
        call.keep_selection(select(torch.where(seen_BQ, scores, LOWEST), spec.num_selected))
    assert call.selection is not None, "no layer before it has an indexer"
    return call.selection


def gather_rows(blocks_NSKD: torch.Tensor, table_BW: torch.Tensor, cache: VLLMKVCache = PLAIN.k_cache) -> torch.Tensor:
    """The rows' blocks side by side: a view [B, K, W * S, D] of gathered memory."""
    rows, width = table_BW.shape
    _, block_size, num_kv_heads, head_size = blocks_NSKD.shape
    gathered = cache.fetch_from_cache(blocks_NSKD, table_BW.flatten())
    return gathered.view(rows, width * block_size, num_kv_heads, head_size).transpose(1, 2)


def visible(call: AttentionCall, spec: AttentionLayerSpec) -> torch.Tensor:
    """bool [B, Q, W * S]: which keys of its table a query may read."""
    keys, queries = _key_positions(call, spec), query_positions(call.starts_B, call.num_queries)
    seen = in_reach(keys, queries, spec)
    if not spec.is_causal:
        assert call.num_real_B is not None
        # Keys of padding are in the pad block, and those of other prompts may be in what follows a row's last key.
        seen = seen & (keys < (call.starts_B + call.num_real_B)[:, None, None])
    if call.spans is None:
        return seen
    return seen | ((keys > queries) & (keys <= call.spans.lasts_BQ[..., None]))


def _distances(call: AttentionCall, spec: AttentionLayerSpec) -> torch.Tensor:
    """float32 [B, Q, W * S]: how far a key of its table is before a query."""
    return (query_positions(call.starts_B, call.num_queries) - _key_positions(call, spec)).float()


def _key_positions(call: AttentionCall, spec: AttentionLayerSpec) -> torch.Tensor:
    num_keys = call.block_table_BW.shape[1] * spec.block_size
    return torch.arange(num_keys, dtype=torch.int32, device=call.starts_B.device)


# --- shared with the flat form ---


def by_head(numbers_H: torch.Tensor, spec: AttentionLayerSpec) -> torch.Tensor:
    """float32 [K, G, 1, 1]: to meet scores."""
    return numbers_H.float().view(spec.num_kv_heads, -1, 1, 1)


def query_positions(starts: torch.Tensor, num_queries: int) -> torch.Tensor:
    """[..., Q, 1]: positions of each row's queries, to be compared with positions of keys."""
    offsets_Q = torch.arange(num_queries, dtype=torch.int32, device=starts.device)
    return (starts[:, None] + offsets_Q)[..., None]


def in_reach(key_pos: torch.Tensor, query_pos: torch.Tensor, spec: AttentionLayerSpec) -> torch.Tensor:
    """A query sees the keys up to its own: under a window the last ones, with chunks those of its chunk. In a layer
    that is not causal it sees as many of the later ones, which end where the row does."""
    last = query_pos if spec.is_causal else query_pos + (spec.sliding_window or _NO_WINDOW) - 1
    seen = key_pos <= last
    if spec.sliding_window is not None:
        seen = seen & (key_pos > query_pos - spec.sliding_window)
    if spec.attention_chunk is not None:
        seen = seen & (key_pos >= query_pos - query_pos % spec.attention_chunk)
    return seen


def group_queries(query_THD: torch.Tensor, call: AttentionCall, spec: AttentionLayerSpec) -> torch.Tensor:
    """[B, K, G * Q, D]: the queries that share a KV head meet its keys in one matmul."""
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
    """float32 [..., K, G, Q, keys] of queries [..., K, G * Q, D] and keys [..., K, keys, D]."""
    products = matmul(matmul_form(query), matmul_form(keys).transpose(-1, -2)).float()
    # Scaled after the matmul: before it, bfloat16 would round each query once more.
    if spec.logits_soft_cap:
        products = torch.tanh(products * (spec.scale / spec.logits_soft_cap)) * spec.logits_soft_cap
    else:
        products = products * spec.scale
    group = spec.num_heads // spec.num_kv_heads
    return products.view(*products.shape[:-2], group, call.num_queries, keys.shape[-2])


def weigh(
    weights: torch.Tensor, values: torch.Tensor, spec: AttentionLayerSpec, matmul: Matmul = PLAIN.matmul_av
) -> torch.Tensor:
    """[..., K, G, Q, output size] of weights [..., K, G, Q, keys] and values [..., K, keys, D]."""
    values = matmul_form(values)
    summed = matmul(weights.to(values.dtype).flatten(-3, -2), values)
    # Where keys hold the values, whole keys are multiplied: taking a part of each would copy them all.
    return summed[..., : spec.output_size].unflatten(-2, weights.shape[-3:-1])


def matmul_form(tensor: torch.Tensor) -> torch.Tensor:
    """Matrix engines take bfloat16 and sum in float32; float16 would overflow in the products."""
    return tensor if tensor.dtype == torch.bfloat16 else tensor.float()


def by_token(result_BKGQD: torch.Tensor, spec: AttentionLayerSpec) -> torch.Tensor:
    """[T, H, output size], in the layer's dtype."""
    return result_BKGQD.permute(0, 3, 1, 2, 4).to(spec.dtype).reshape(-1, spec.num_heads, spec.output_size)

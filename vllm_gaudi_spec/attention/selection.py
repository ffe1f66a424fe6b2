"""Key selection for sparse attention, as a mask for dense attention that keeps the keys with the highest index scores.

Dimensions: I index heads of size R; B rows of Q queries; keys as in padded.py and flat.py. Shapes are static, and the
host reads no values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec


def group_index_queries(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return index queries [B, I, Q, R] and their weights [B, I, Q]."""
    assert call.index is not None, "the layer has an indexer, but the call has no index queries"
    query_TIR, weights_TI = call.index
    shape = (call.num_rows, call.num_queries)
    return query_TIR.unflatten(0, shape).transpose(1, 2), weights_TI.unflatten(0, shape).transpose(1, 2)


def score_keys(
    query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, spec: AttentionLayerSpec
) -> torch.Tensor:
    """Return scores, float32 [..., Q, keys], for queries [..., I, Q, R], weights [..., I, Q] and keys [..., keys, D].

    Heads are scored a few at a time. An indexer has more heads than a rank has attention heads, so the scores for all
    index heads would be the model's largest tensor.
    """
    num_heads, num_queries = query.shape[-3:-1]
    # Compute in float32, because rounding could make different scores equal.
    query, keys = query.float(), keys[..., -spec.index_size :].float().transpose(-1, -2)
    total: torch.Tensor | None = None
    for first in range(0, num_heads, spec.num_heads):
        some = min(spec.num_heads, num_heads - first)
        part = query.narrow(-3, first, some)
        products = (part.flatten(-3, -2) @ keys).unflatten(-2, (some, num_queries))
        summed = (products.relu() * weights.narrow(-2, first, some)[..., None]).sum(-3)
        total = summed if total is None else total + summed
    assert total is not None
    return total


def select(scores_BQK: torch.Tensor, number: int) -> torch.Tensor:
    """Return the keys with the `number` highest scores for each query, as bool.

    Earlier keys win ties. Ties are common because negative dot products count as zero, and the selection must not
    depend on the number of later keys.
    """
    last = scores_BQK.topk(number, dim=-1).values[..., -1:]
    above, equal = scores_BQK > last, scores_BQK == last
    room = number - above.sum(-1, keepdim=True, dtype=torch.int32)
    return above | (equal & (equal.int().cumsum(-1, dtype=torch.int32) <= room))

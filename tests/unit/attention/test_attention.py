"""Attention in plain torch over vLLM's KV layout, against dense attention in float64; padded and packed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vllm_gaudi_spec.attention import torch_ops
from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec, Packed

SPEC = AttentionLayerSpec(
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    scale=0.2,
    sliding_window=None,
    logits_soft_cap=0.0,
    dtype=torch.float32,
    block_size=32,
)


def test_packed_rectangle_equals_padded() -> None:
    """Some rows are short, and one has no query at all."""
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, 5 * 32, 2, 32, generator=generator)
    cache = torch.zeros(5, 2, 32, 64)
    torch_ops.write_kv(*kv, cache, torch.arange(5 * 32), SPEC)
    whole = AttentionCall(
        num_rows=4,
        num_queries=3,
        starts_B=torch.tensor([40, 0, 17, 31], dtype=torch.int32),
        block_table_BW=torch.tensor([[1, 2], [0, 0], [3, 0], [4, 2]], dtype=torch.int32),
    )
    query = torch.randn(12, 4, 32, generator=generator)
    expected = torch_ops.attend(query, cache, whole, SPEC)
    counts_B = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    kept = Packed.from_counts(counts_B, 3)
    assert kept is not None
    assert kept.index_T.tolist() == [0, 1, 6, 7, 8, 9]
    out = torch_ops.attend(query[kept.index_T], cache, replace(whole, packed=kept, _plans={}), SPEC)
    assert out.shape == (6, 4, 32)
    assert torch.allclose(out, expected[kept.index_T], atol=1e-6)
    assert torch.equal(kept.spread(out, 12)[kept.index_T], out)
    assert not kept.spread(out, 12)[[2, 3, 4, 5, 10, 11]].any()


@pytest.mark.parametrize("counts", [[2, 2], [0, 0]])
def test_nothing_is_packed_where_all_or_nothing_is_real(counts: list[int]) -> None:
    assert Packed.from_counts(torch.tensor(counts, dtype=torch.int32), 2) is None

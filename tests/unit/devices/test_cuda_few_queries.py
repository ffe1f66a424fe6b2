"""The GPU's kernel for rows of few queries against vLLM's rotary embedding and dense attention in float64.

Run on a GPU, or without one with TRITON_INTERPRET=1.
"""

import dataclasses

import pytest
import torch

from tests.unit.attention.test_paged_attention import TOLERANCE, Scene, make_scene
from vllm_gaudi_spec.devices.common.kv_pair import KVPair

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter can neither multiply bfloat16 nor round to it.
HALF = [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.float16]


def indices_of(scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions and slots of all tokens. Padding is at position 0 and in the pad block."""
    rows, queries = scene.call.num_rows, scene.call.num_queries
    positions, slots = torch.zeros(2, rows, queries, dtype=torch.int64).unbind(0)
    size = scene.spec.block_size
    slots[:] = torch.arange(rows * queries).view(rows, queries) % size
    for row, (start, real) in enumerate(zip(scene.starts, scene.real, strict=True)):
        for query in range(real):
            position = start + query
            positions[row, query] = position
            slots[row, query] = scene.blocks[row][position // size] * size + position % size
    return positions.flatten(), slots.flatten()


def check(scene: Scene, rotary_dim: int | None = None, times: int = 1) -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from vllm_gaudi_spec.devices.cuda import few_queries

    spec, dtype = scene.spec, scene.spec.dtype
    tokens, heads, size = scene.call.num_rows * scene.call.num_queries, spec.num_heads, spec.head_size
    dim = size if rotary_dim is None else rotary_dim
    positions, slots = indices_of(scene)
    is_real = torch.zeros(scene.call.num_rows, scene.call.num_queries, dtype=torch.bool)
    for row, real in enumerate(scene.real):
        is_real[row, :real] = True
    is_real = is_real.flatten()
    # Slices of a projection's result.
    projected = torch.randn(tokens, (heads + 2 * spec.num_kv_heads) * size + 16).to(dtype)
    query, key, value, _ = projected.split([heads * size, *[spec.num_kv_heads * size] * 2, 16], dim=-1)
    angles = torch.rand(max(scene.starts) + scene.call.num_queries, dim // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    turned = RotaryEmbedding.forward_static(positions, query.clone(), key.clone(), size, dim, table, True)

    keys, values = (stored.flatten(0, 1).clone() for stored in (scene.keys, scene.values) if stored is not None)
    for stored in (keys, values):
        # Slots that are not written yet.
        stored[slots[is_real]] = torch.nan
    kv = KVPair(keys.to(DEVICE), values.to(DEVICE), spec.block_size)
    call = dataclasses.replace(
        scene.call,
        starts_B=scene.call.starts_B.to(DEVICE),
        block_table_BW=scene.call.block_table_BW.to(DEVICE),
        flat=None,
    )
    there = projected.to(DEVICE)
    parts = there.split([heads * size, *[spec.num_kv_heads * size] * 2, 16], dim=-1)[:3]
    fresh = few_queries.Projected(*parts, slots.to(DEVICE))
    rotary = few_queries.Rotary(positions.to(DEVICE), table.to(DEVICE), dim)
    assert few_queries.takes(call, spec)
    for _ in range(times):
        found = few_queries.attend(fresh, rotary, kv, call, spec)
    assert torch.equal(there.cpu(), projected)
    assert found.shape == query.shape
    assert torch.isfinite(found).all()

    new_key, new_value = (new.reshape(tokens, spec.num_kv_heads, size) for new in (turned[1], value))
    for stored, new in ((keys, new_key), (values, new_value)):
        stored[slots[is_real]] = new[is_real]
    assert torch.equal(kv.values.cpu()[slots[is_real]], new_value[is_real])
    atol, rtol = TOLERANCE[torch.float32 if dtype == torch.float32 else torch.bfloat16]
    torch.testing.assert_close(kv.keys.cpu()[slots[is_real]], new_key[is_real], atol=atol, rtol=rtol)
    scene.keys, scene.values = keys.view(scene.keys.shape), values.view(scene.keys.shape)
    scene.query_BQHD = turned[0].reshape(scene.query_BQHD.shape)
    out = found.cpu().view(scene.query_BQHD.shape)
    for row, expected in enumerate(scene.dense()):
        torch.testing.assert_close(out[row, : scene.real[row]].double(), expected, atol=atol, rtol=rtol)


@pytest.fixture(params=["split", "whole", "long rows split"])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_gaudi_spec.devices.cuda import attention, few_queries

    if request.param != "split":
        for name in ("SHORT_HEADS", "LONG_HEADS"):
            monkeypatch.setattr(few_queries, name, getattr(few_queries, name)._replace(instances=1))
    if request.param == "long rows split":
        monkeypatch.setattr(attention, "SHORT", 0)
    else:
        monkeypatch.setattr(few_queries, "_LAUNCHED", 0)


@pytest.mark.parametrize("head_size", [32, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (14, 2), (5, 1)])
@pytest.mark.parametrize("queries", [1, 3])
def test_heads(splits: None, heads: int, kv_heads: int, head_size: int, queries: int) -> None:
    check(make_scene([0, 31, 70], queries, heads=heads, kv_heads=kv_heads, head_size=head_size))


@pytest.mark.parametrize("block_size", [16, 48, 128])
@pytest.mark.parametrize("window", [None, 1, 33])
@pytest.mark.parametrize("queries", [1, 4])
def test_blocks_and_windows(splits: None, block_size: int, window: int | None, queries: int) -> None:
    check(make_scene([0, 15, 16, 130, 300], queries, block_size=block_size, window=window))


def test_padding_and_partial_rotation(splits: None) -> None:
    check(make_scene([7, 90], 5, real=[5, 2], head_size=80, pad_rows=2), rotary_dim=32)


def test_the_most_queries(splits: None) -> None:
    check(make_scene([0, 90], 16, heads=8, kv_heads=2))


def test_soft_cap(splits: None) -> None:
    check(make_scene([5, 90], 2, soft_cap=5.0, head_size=128))


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision(splits: None, dtype: torch.dtype) -> None:
    check(make_scene([0, 200], 5, dtype=dtype, heads=8, kv_heads=2, head_size=128, pad_size=1.0))


def test_more_parts_than_are_combined_at_once() -> None:
    check(make_scene([600, 5], 5, heads=8, kv_heads=2, head_size=128, block_size=16))


def test_arrival_counters_are_reset() -> None:
    """Otherwise the next call would combine its parts too early, or never."""
    from vllm_gaudi_spec.devices.cuda import few_queries

    check(make_scene([70, 300], 1), times=3)
    assert not few_queries._get_arrivals(DEVICE).any()

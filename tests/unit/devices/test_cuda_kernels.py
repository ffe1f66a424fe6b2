"""The GPU's Triton kernels against dense attention in float64 and vLLM's layers.

Run on a GPU, or without one with TRITON_INTERPRET=1.
"""

import dataclasses
from typing import Any

import pytest
import torch

from tests.unit.attention.test_paged_attention import TOLERANCE, Scene, check_bidirectional, make_scene
from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec
from vllm_gaudi_spec.devices.common.kv_pair import KVPair

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter can neither multiply bfloat16 nor round to it.
HALF = [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.float16]


def by_kernel(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: AttentionCall, spec: AttentionLayerSpec
) -> torch.Tensor:
    from vllm_gaudi_spec.devices.cuda import attention as cuda_attention

    # Queries are a slice of a projection's result, so tokens are further apart than they are long.
    projected = torch.full((query.shape[0], query.shape[1] + 2, query.shape[2]), torch.nan, dtype=query.dtype)
    projected[:, 1:-1] = query
    kv = KVPair(keys.flatten(0, 1).to(DEVICE), values.flatten(0, 1).to(DEVICE), spec.block_size)
    there = dataclasses.replace(
        call,
        starts_B=call.starts_B.to(DEVICE),
        block_table_BW=call.block_table_BW.to(DEVICE),
        num_real_B=None if call.num_real_B is None else call.num_real_B.to(DEVICE),
        flat=None,
    )
    return cuda_attention.attend(projected.to(DEVICE)[:, 1:-1], kv, there, spec).cpu()


def check(scene: Scene) -> None:
    out = scene.attend(by_kernel)
    assert torch.isfinite(out).all()
    atol, rtol = TOLERANCE[torch.float32 if scene.spec.dtype == torch.float32 else torch.bfloat16]
    for row, expected in enumerate(scene.dense()):
        torch.testing.assert_close(out[row, : scene.real[row]].double(), expected, atol=atol, rtol=rtol)


@pytest.fixture(params=["split", "whole"])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_gaudi_spec.devices.cuda import attention as cuda_attention

    if request.param == "whole":
        for name in ("_BUSY", "_ONE_EACH"):
            monkeypatch.setattr(cuda_attention, name, 1)


SCENES: list[tuple[list[int], int, dict[str, Any]]] = [
    *(
        ([0, 31, 70], queries, dict(heads=heads, kv_heads=kv_heads, head_size=head_size))
        for queries in (1, 17)
        for heads, kv_heads in ((4, 4), (6, 2), (5, 1))
        for head_size in (32, 80, 256)
    ),
    *(
        ([0, 15, 16, 130, 300], queries, dict(block_size=block_size, window=window))
        for queries in (1, 4)
        for block_size in (16, 48, 128)
        for window in (None, 1, 33)
    ),
    # Prompt chunks of more lanes than a tile has.
    *(([0, 77], 96, dict(real=[90, 41], window=window, head_size=32)) for window in (None, 20)),
    # Tiles of 64 lanes, which read the keys that all lanes see separately.
    *(
        (starts, 70, dict(real=[70, 33][: len(starts)], block_size=block_size, heads=4, head_size=128))
        for starts in ([0], [5, 130])
        for block_size in (16, 64)
    ),
    *(([5, 90], queries, dict(soft_cap=5.0, query_size=8.0, head_size=128)) for queries in (3, 70)),
]


@pytest.mark.parametrize(("starts", "queries", "options"), SCENES)
def test_attention(splits: None, starts: list[int], queries: int, options: dict[str, Any]) -> None:
    check(make_scene(starts, queries, **options))


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("heads", [2, 8])
def test_bidirectional_block_sees_keys_after_each_query(splits: None, heads: int, window: int | None) -> None:
    check_bidirectional(by_kernel, [0, 70, 100], [5, 5, 3], 5, heads=heads, window=window)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("head_size", [32, 128])
def test_bidirectional_prompt_sees_all_real_keys(splits: None, head_size: int, window: int | None) -> None:
    """Check several tiles, tiles whose keys all lanes see, and padding queries that see no key."""
    check_bidirectional(by_kernel, [0, 0], [96, 33], 96, head_size=head_size, window=window)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("queries", [1, 5, 40])
def test_half_precision(splits: None, queries: int, dtype: torch.dtype) -> None:
    check(make_scene([0, 200], queries, dtype=dtype, heads=8, kv_heads=2, head_size=128, pad_size=1.0))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 7, 96), (2, 130, 1100), (1, 16, 2048), (2, 6, 5000), (2, 1, 96)]
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_layers_of_few_rows(dtype: torch.dtype, rows: int, outputs: int, inputs: int, has_bias: bool) -> None:
    """Weights and inputs may be slices of longer rows; what a tile cannot hold is read in several parts."""
    from vllm_gaudi_spec.devices.cuda import linear as cuda_linear

    x = torch.randn(rows, inputs + 8, device=DEVICE).to(dtype)[:, :inputs]
    weight = torch.randn(outputs, inputs + 16, device=DEVICE).to(dtype)[:, :inputs]
    bias = torch.randn(outputs, device=DEVICE).to(dtype) if has_bias else None
    expected = torch.nn.functional.linear(*(None if one is None else one.double() for one in (x, weight, bias)))
    found = cuda_linear.multiply_few_rows(x, weight, bias)
    assert found.dtype == dtype
    close: dict[str, Any] = dict(atol=1e-4, rtol=1e-5) if dtype == torch.float32 else dict(atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(found.double(), expected, **close)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 14, 96), (2, 260, 700), (2, 8, 1024)])
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_norm_inside_a_linear_layer(
    dtype: torch.dtype, rows: int, outputs: int, inputs: int, has_residual: bool, gated: bool
) -> None:
    from vllm.model_executor.layers.activation import SiluAndMul

    from vllm_gaudi_spec.devices.cuda import kernels as cuda_kernels
    from vllm_gaudi_spec.devices.cuda import linear as cuda_linear

    x, residual = (torch.randn(rows, inputs, device=DEVICE).to(dtype) for _ in range(2))
    norm_weight, bias = torch.randn(inputs, device=DEVICE).to(dtype), torch.randn(outputs, device=DEVICE).to(dtype)
    weight = (torch.randn(outputs, inputs, device=DEVICE) / inputs**0.5).to(dtype)
    normed, added = cuda_kernels.rms_norm(x, norm_weight, 1e-5), x
    if has_residual:
        normed, added = cuda_kernels.add_rms_norm(x, residual, norm_weight, 1e-5)
    expected = torch.nn.functional.linear(normed.double(), weight.double(), bias.double())
    unnormed = cuda_linear.Unnormed(x, residual if has_residual else None, norm_weight, 1e-5)
    found = cuda_linear.linear(unnormed, weight, bias, gated=gated)
    assert torch.equal(unnormed.added, added)
    close: dict[str, Any] = dict(atol=1e-5, rtol=1e-5) if dtype == torch.float32 else dict(atol=3e-2, rtol=2e-2)
    torch.testing.assert_close(found.double(), SiluAndMul.forward_native(expected) if gated else expected, **close)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("outputs", "inputs", "gated", "rows", "splits"),
    [
        (1088, 256, True, 3, 1),
        (128, 1280, True, 64, 1),
        (1090, 256, False, 33, 1),
        (130, 256, False, 3, 1),
        (1, 256, False, 3, 1),
        (130, 2560, False, 16, 3),
        (1000, 9088, False, 20, 4),
        (130, 9088, False, 9, 4),
        (130, 2560, False, 64, 3),
    ],
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_layers_of_some_rows(
    dtype: torch.dtype, rows: int, outputs: int, inputs: int, gated: bool, splits: int, has_bias: bool
) -> None:
    """Each call runs twice: instances that share an output's inputs must reset their counters."""
    from vllm.model_executor.layers.activation import SiluAndMul

    from vllm_gaudi_spec.devices.cuda import linear as cuda_linear

    x = torch.randn(rows, inputs + 8, device=DEVICE).to(dtype)[:, :inputs]
    weight = (torch.randn(outputs, inputs + 16, device=DEVICE) / inputs**0.5).to(dtype)[:, :inputs]
    bias = torch.randn(outputs, device=DEVICE).to(dtype) if has_bias else None
    assert cuda_linear._num_splits(rows, weight, gated=gated) == splits
    expected = torch.nn.functional.linear(*(None if one is None else one.double() for one in (x, weight, bias)))
    wanted = SiluAndMul.forward_native(expected) if gated else expected
    for _ in range(2):
        found = cuda_linear.linear(x, weight, bias, gated=gated)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, atol=2e-2, rtol=1e-2)

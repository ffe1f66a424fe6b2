"""Layers in FP8 against float64 arithmetic on numbers out of the table, and rectangles against rows of one query."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.reference.e4m3 import nearest
from tests.unit.attention.test_paged_attention import Scene, make_scene
from vllm_gaudi_spec.attention import flat, padded, torch_ops
from vllm_gaudi_spec.attention.metadata import FlatBlocks
from vllm_gaudi_spec.attention.operations import Operations, VLLMKVCache
from vllm_gaudi_spec.quantization.fp8 import HostArithmetic, to_e4m3
from vllm_gaudi_spec.quantization.layers import CalibratedLinear, Fp8Cache, Fp8Matmul, Fp8Softmax, serve_linear

LARGEST = 240.0
HOST = HostArithmetic(LARGEST)


@pytest.mark.parametrize("per_channel", [False, True], ids=["per tensor", "per channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(per_channel: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(96, 40, dtype=dtype)
    weight, bias, x = layer.weight.detach().clone(), layer.bias.detach().clone(), torch.randn(7, 96, dtype=dtype) * 3
    input_scale = torch.tensor(0.03)
    weight_scale = torch.rand(40) * 2e-3 + 5e-4 if per_channel else torch.tensor(1e-3)
    weight_KN = to_e4m3(weight.float().t() * (1 / weight_scale), LARGEST)
    serve_linear(layer, CalibratedLinear(layer, weight_KN, input_scale, weight_scale, HOST))

    values = nearest(weight.float().t() * (1 / weight_scale), LARGEST)
    scale = input_scale.double() * weight_scale.double()
    if dtype is torch.bfloat16:  # scales, products with them and the sum are rounded
        product = (nearest((x * (1 / input_scale).bfloat16()).float(), LARGEST) @ values).bfloat16() * scale.bfloat16()
    else:
        product = nearest(x * (1 / input_scale), LARGEST) @ values * scale
    expected = product.to(dtype) + bias
    assert torch.equal(layer(x), expected)
    assert layer.weight.numel() == 0  # it is kept once
    close = dict(atol=0.4, rtol=0.0)  # and it is the layer that it was, but for what 3 bits round
    torch.testing.assert_close(layer(x).float(), nn.functional.linear(x, weight, bias).float(), **close)


def test_matmul_softmax_and_cache() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 5, 16), torch.randn(2, 3, 16, 9)
    x_scale, y_scale = torch.tensor(0.02), torch.tensor(0.05)
    product = nearest(x / x_scale, LARGEST) @ nearest(y / y_scale, LARGEST)
    out = Fp8Matmul(x_scale, y_scale, HOST)(x, y)
    torch.testing.assert_close(out, (product * 0.02 * 0.05).float(), rtol=1e-6, atol=1e-6)

    scale = torch.tensor(1 / 64)
    weights = Fp8Softmax(scale, HOST)(x, -1)
    assert torch.equal(weights.double(), nearest(x.softmax(-1) * 64, LARGEST) / 64)

    blocks = torch.zeros(4, 2, 2, 16, dtype=torch.float8_e4m3fn)  # 4 blocks of 2 slots
    keys, slots = torch.randn(3, 2, 16), torch.tensor([5, 0, 2])
    cache = Fp8Cache(scale, HOST, torch.float32)
    cache(keys, torch_ops._Slots(blocks), slots)
    stored = cache.fetch_from_cache(blocks, torch.arange(4)).transpose(1, 2).flatten(0, 1)
    assert torch.equal(stored[slots].double(), nearest(keys * 64, LARGEST) / 64)
    assert stored.count_nonzero(dim=(1, 2)).bool().tolist() == [True, False, True, False, False, True, False, False]


class Fp8Operations:
    """A layer's, with scales for numbers of size 1."""

    k_cache = v_cache = VLLMKVCache()
    matmul_qk = Fp8Matmul(torch.tensor(0.02), torch.tensor(0.03), HOST)
    softmax = Fp8Softmax(torch.tensor(2.0**-7), HOST)
    matmul_av = Fp8Matmul(torch.tensor(2.0**-7), torch.tensor(0.03), HOST)


OPERATIONS: Operations = Fp8Operations()


def attend(scene: Scene, form: Any, call: Any = None) -> torch.Tensor:
    return replace(scene, spec=replace(scene.spec, operations=OPERATIONS)).attend(form, call)


@pytest.mark.parametrize("form", [padded.attend, flat.attend], ids=["padded", "flat"])
@pytest.mark.parametrize("changes", [{}, dict(window=40), dict(soft_cap=5.0)], ids=str)
def test_attention_is_what_it_was_but_for_its_rounding(form: Any, changes: dict[str, Any]) -> None:
    scene = make_scene([0, 5, 31, 70], 5, **changes)
    for row, expected in zip(attend(scene, form), scene.dense(), strict=False):
        torch.testing.assert_close(row[: len(expected)].float(), expected.float(), atol=0.25, rtol=0.0)
        assert not torch.equal(row[: len(expected)].float(), expected.float())


@pytest.mark.parametrize("form", ["padded", "flat"])
def test_a_verify_rectangle_equals_its_queries_alone_bit_for_bit(form: str) -> None:
    """Else a draft that is right would be refused now and then: FP8 makes a large step of a last bit."""
    queries = 5
    scene = make_scene([0, 5, 31, 70], queries)
    rectangle = attend(scene, {"padded": padded.attend, "flat": flat.attend}[form])
    listed = scene.call.flat
    assert listed is not None
    for offset in range(queries):
        call = replace(
            scene.call,
            num_queries=1,
            starts_B=scene.call.starts_B + offset,
            flat=FlatBlocks(listed.ids, listed.rows_N, listed.index_N),
            _plans={},
        )
        one = replace(scene, query_BQHD=scene.query_BQHD[:, offset : offset + 1], call=call)
        alone = attend(one, {"padded": padded.attend, "flat": flat.attend}[form])
        assert torch.equal(alone[:4, 0], rectangle[:4, offset])

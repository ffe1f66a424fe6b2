"""Linear layers of FP8 checkpoints where a device multiplies FP8: beside the product of what was rounded."""

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear

from tests.models.formats import FORMATS, GROUP
from tests.support.linears import LAYER, layer, load, matrix
from vllm_gaudi_spec.config import E4M3_MAX
from vllm_gaudi_spec.quantization.formats import read_format
from vllm_gaudi_spec.quantization.fp8 import HostArithmetic
from vllm_gaudi_spec.quantization.native_linears import Fp8Linear

GAUDIS = pytest.mark.parametrize("largest", E4M3_MAX.values(), ids=E4M3_MAX)


def linear(parts: dict[str, torch.Tensor], name: str, largest: float) -> Any:
    weight, scale = read_format(FORMATS[name].config).find_encoding(LAYER).fp8_rows(parts)
    method = Fp8Linear(arithmetic=HostArithmetic, largest=largest, prefix=LAYER)
    made = layer(ReplicatedLinear, method, 2 * GROUP, GROUP, bias=False, disable_tp=True)
    made.weight.data.copy_(weight)
    made.weight_scale.data.copy_(scale)
    method.process_weights_after_loading(made)
    return made


@GAUDIS
@pytest.mark.parametrize("name", ["ct-fp8-dynamic", "ct-fp8-static", "fp8-tensor-dynamic", "ct-fp8-block", "fp8-block"])
def test_the_product_is_that_of_what_was_rounded(name: str, largest: float) -> None:
    parts, meant = FORMATS[name].weights(matrix(GROUP))
    x = matrix(5, seed=1)
    x[3] = 0
    out = linear(parts, name, largest)(x)
    exact = x @ meant.t()
    # 4 bits of each factor: the error of a sum of 256 products grows with its root, as the sum does.
    assert float((out - exact).std() / exact.std()) < 0.06
    assert not out[3].any()


@GAUDIS
def test_numbers_of_rows_are_not_rounded_again(largest: float) -> None:
    """Inputs that e4m3 has leave no error but that of the halves of the smallest numbers on a Gaudi 2."""
    parts, meant = FORMATS["ct-fp8-dynamic"].weights(matrix(GROUP))
    out = linear(parts, "ct-fp8-dynamic", largest)(torch.eye(2 * GROUP))
    torch.testing.assert_close(out.t(), meant, rtol=1e-5, atol=1e-6 if largest > 240 else 1e-5)


def test_a_row_does_not_depend_on_the_others() -> None:
    """A verify step has the bits of plain steps."""
    made = linear(FORMATS["ct-fp8-dynamic"].weights(matrix(GROUP))[0], "ct-fp8-dynamic", 240.0)
    rows = matrix(6, seed=2)
    assert torch.equal(made(rows), torch.cat([made(row[None]) for row in rows]))


def test_only_rows_beyond_the_range_are_halved() -> None:
    """A number below 2**-5 may have no half: 9 * 2**-9."""
    weight = torch.full((2, 2 * GROUP), 9 * 2.0**-9)
    weight[1, 0] = 448
    method = Fp8Linear(arithmetic=HostArithmetic, largest=240.0, prefix=LAYER)
    made = layer(ReplicatedLinear, method, 2 * GROUP, 2, bias=False, disable_tp=True)
    made.weight.data.copy_(weight)
    made.weight_scale.data.fill_(1)
    method.process_weights_after_loading(made)
    assert made.weight_scale.tolist() == [1, 2]
    stored = made.weight.t().float() * made.weight_scale[:, None]
    assert torch.equal(stored[0], weight[0])
    assert float((stored[1] - weight[1]).abs().max()) == 2.0**-9


def test_merged_projections_cut_for_ranks() -> None:
    """Scales of rows follow their rows."""
    method = Fp8Linear(arithmetic=HostArithmetic, largest=448.0, prefix=LAYER)
    parts = {shard: FORMATS["ct-fp8-dynamic"].weights(matrix(GROUP, seed))[0] for seed, shard in enumerate("qkv")}
    for rank in range(2):
        made = layer(QKVParallelLinear, method, 2 * GROUP, 32, 4, 4, bias=False, rank=rank, world=2)
        for shard, found in parts.items():
            load(made, found, shard)
        half = slice(rank * 64, (rank + 1) * 64)
        for position, shard in enumerate("qkv"):
            rows = slice(position * 64, (position + 1) * 64)
            assert torch.equal(made.weight_scale[rows], parts[shard]["weight_scale"][half])
            assert torch.equal(made.weight[rows].float(), parts[shard]["weight"][half].float())

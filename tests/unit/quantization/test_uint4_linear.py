"""Linear layers that keep 4-bit integers: beside the product of what the checkpoint stands for."""

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.linear import (
    LinearBase,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from card_emulator.gaudi.fused import convert_from_uint4
from tests.models.formats import FORMATS, GROUP
from tests.support.linears import LAYER, layer, load, matrix
from vllm_gaudi_spec.quantization.encodings import Words
from vllm_gaudi_spec.quantization.formats import read_format
from vllm_gaudi_spec.quantization.native_linears import Uint4Linear

NATIVE = ("ct-w4a16", "ct-w4a16-asym", "awq", "gptq", "auto-round")


def convert(words: Words, dtype: torch.dtype) -> torch.Tensor:
    return convert_from_uint4(words.weight_KW, words.scales_GN, words.zeros_GW, dtype)


def words_of(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """As the reader yields them, and the weight that they stand for."""
    parts, meant = FORMATS[name].weights(weight)
    words = read_format(FORMATS[name].config).find_encoding(LAYER).words(parts)
    return dict(weight_packed=words.weight_KW, weight_scale=words.scales_GN, weight_zero_point=words.zeros_GW), meant


def uint4_layer(kind: type[LinearBase], *sizes: int, **options: Any) -> Any:
    return layer(kind, Uint4Linear(convert=convert, group_size=GROUP, prefix=LAYER), *sizes, **options)


@pytest.mark.parametrize("name", NATIVE)
def test_the_product_is_that_of_what_the_words_stand_for(name: str) -> None:
    found, meant = words_of(name, matrix(GROUP))
    made = uint4_layer(ReplicatedLinear, 2 * GROUP, GROUP, bias=True, disable_tp=True)
    load(made, found)
    made.bias.data.fill_(2.0)
    made.quant_method.process_weights_after_loading(made)
    x = matrix(5, seed=1).reshape(1, 5, -1)
    torch.testing.assert_close(made(x), x @ meant.t() + 2)
    stored = sum(parameter.nbytes for name, parameter in made.named_parameters() if name.startswith("weight"))
    assert stored < 0.2 * meant.nbytes


@pytest.mark.parametrize("rank", [0, 1])
def test_merged_projections_cut_for_ranks(rank: int) -> None:
    """Words of outputs; scales and zero points follow them."""
    made = uint4_layer(QKVParallelLinear, 2 * GROUP, 32, 4, 2, bias=False, rank=rank, world=2)
    meant = []
    for seed, (shard, heads) in enumerate(zip("qkv", (4, 2, 2), strict=True)):
        found, weight = words_of("ct-w4a16-asym", matrix(32 * heads, seed))
        load(made, found, shard)
        meant.append(weight.chunk(2)[rank])
    made.quant_method.process_weights_after_loading(made)
    x = matrix(3, seed=9)
    torch.testing.assert_close(made(x), x @ torch.cat(meant).t())


def test_inputs_cut_for_ranks() -> None:
    found, meant = words_of("awq", matrix(64))
    made = uint4_layer(RowParallelLinear, 2 * GROUP, 64, bias=False, reduce_results=False, rank=1, world=2)
    load(made, found)
    x = matrix(3, seed=9, columns=GROUP)
    torch.testing.assert_close(made(x), x @ meant[:, GROUP:].t())


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(GROUP, 64), (2 * GROUP, 60)])
def test_a_part_that_ends_within_a_group_or_a_word_is_decoded(num_inputs: int, num_outputs: int) -> None:
    made = uint4_layer(RowParallelLinear, num_inputs, num_outputs, bias=False, world=2)
    assert isinstance(made.quant_method, UnquantizedLinearMethod)
    assert made.weight.shape == (num_outputs, num_inputs // 2)

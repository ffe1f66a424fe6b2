"""What quantized tensors stand for: beside what the tests' packers rounded, and compressed-tensors' dequantization."""

from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from tests.models.formats import AWQ, CT_W4, FORMATS, GROUP, compressed, numbers
from vllm_gaudi_spec.quantization.encodings import EncodingError
from vllm_gaudi_spec.quantization.formats import UINT4, UnknownFormatError, read_format

LAYER = "model.layers.0.mlp.up_proj"
QUANTIZED = [name for name, format in FORMATS.items() if format.weights is not None]


def matrix(rows: int = 2 * GROUP, columns: int = 3 * GROUP) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_weight_is_what_it_stands_for(name: str) -> None:
    parts, meant = FORMATS[name].weights(matrix())
    encoding = read_format(FORMATS[name].config).find_encoding(LAYER)
    torch.testing.assert_close(encoding.weight(parts), meant, rtol=1e-6, atol=1e-6)


MXFP4 = FORMATS["gpt-oss-mxfp4"]
EXPERTS = "model.layers.0.mlp.experts"


def test_stacked_experts_are_what_transformers_makes_of_them() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    parts, meant = MXFP4.stacks(torch.randn(3, 96, 40, generator=torch.Generator().manual_seed(0)))
    found = read_format(MXFP4.config).find_encoding(f"{EXPERTS}.gate_up_proj").weight(parts)
    assert torch.equal(found.float(), meant)
    assert torch.equal(found, convert_moe_packed_tensors(parts["blocks"], parts["scales"]))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("scales", None, "has no scales"),
        ("scales", lambda scales: scales[:, :, 1:], "scales or zero points of shape"),
        ("blocks", lambda blocks: blocks.flatten(2), "3-dimensional blocks"),
    ],
)
def test_stacks_that_do_not_fit(part: str, change: Any, reason: str, device: str) -> None:
    parts, _ = MXFP4.stacks(torch.randn(2, 64, 8))
    if change is None:
        del parts[part]
    else:
        parts[part] = change(parts[part])
    encoding = read_format(MXFP4.config).find_encoding(f"{EXPERTS}.down_proj")
    with pytest.raises(EncodingError, match=reason):
        encoding.weight({key: tensor.to(device) for key, tensor in parts.items()})


BLOCKS = numbers(8, "float", "block", block_structure=[GROUP, GROUP])


@pytest.mark.parametrize(
    ("layout", "weights", "shape"),
    [
        pytest.param("float-quantized", numbers(8, "float", "tensor"), (256, 384), id="fp8, one scale"),
        pytest.param("float-quantized", numbers(8, "float", "channel"), (256, 384), id="fp8, channels"),
        pytest.param("float-quantized", BLOCKS, (256, 384), id="fp8, blocks"),
        pytest.param("int-quantized", numbers(8, "int", "channel"), (256, 384), id="int8, channels"),
        pytest.param(
            "int-quantized", numbers(8, "int", "channel", symmetric=False), (256, 384), id="int8, zero points"
        ),
        pytest.param("pack-quantized", CT_W4, (256, 384), id="4 bits, groups"),
        pytest.param("pack-quantized", numbers(4, "int", "channel"), (256, 384), id="4 bits, channels"),
        pytest.param("pack-quantized", CT_W4 | dict(symmetric=False), (252, 384), id="4 bits, zero points"),
        pytest.param("pack-quantized", CT_W4 | dict(actorder="group"), (256, 384), id="4 bits, act-order"),
        pytest.param("pack-quantized", CT_W4 | dict(actorder="dynamic"), (256, 384), id="4 bits, its other name"),
        pytest.param(
            "pack-quantized",
            CT_W4 | dict(num_bits=8, symmetric=False, actorder="group", group_size=64),
            (256, 384),
            id="8 bits, act-order, zero points",
        ),
    ],
)
def test_it_is_what_compressed_tensors_makes_of_it(
    layout: str, weights: dict[str, Any], shape: tuple[int, int]
) -> None:
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(layout)
    parts = compressor.compress(rounding_of(weights, matrix(*shape)), scheme)
    expected = compressor.decompress(parts, scheme)["weight"].float()
    assert expected.std() > 0.5
    encoding = read_format(compressed(layout, weights)).find_encoding(LAYER)
    torch.testing.assert_close(encoding.weight(parts), expected, rtol=1e-6, atol=1e-6)


def test_scales_that_are_exponents() -> None:
    """MXFP8: of the highest byte there is no number."""
    weight = matrix(4, 64).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 128], [120, 126], [127, 127], [255, 127]], dtype=torch.uint8)
    encoding = read_format(dict(quant_method="modelopt", quant_algo="MXFP8")).find_encoding(LAYER)
    found = encoding.weight({"weight": weight, "weight_scale": scale})
    torch.testing.assert_close(found[0], weight[0].float() * torch.tensor([1.0, 2.0]).repeat_interleave(32))
    torch.testing.assert_close(found[1], weight[1].float() * torch.tensor([2**-7, 0.5]).repeat_interleave(32))
    assert bool(found[3, :32].isnan().all())
    assert bool(found[3, 32:].isfinite().all())


def test_blocks_at_the_edges_are_cut() -> None:
    parts, meant = FORMATS["fp8-block"].weights(matrix())
    cut = parts | {"weight": parts["weight"][:200, :300]}
    encoding = read_format(FORMATS["fp8-block"].config).find_encoding(LAYER)
    torch.testing.assert_close(encoding.weight(cut), meant[:200, :300], rtol=0, atol=0)


def cut_to_576(name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Of 4 bits: the last of five groups of 128 inputs has 64."""
    parts, meant = FORMATS[name].weights(matrix(columns=5 * GROUP))
    rows = 576 // 8 if name == "gptq" else 576
    return parts | {"qweight": parts["qweight"][:rows]}, meant[:, :576]


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_the_last_group_may_be_smaller(name: str) -> None:
    """Five groups of 576 inputs are of 128, and not of 116."""
    parts, meant = cut_to_576(name)
    encoding = read_format(FORMATS[name].config).find_encoding(LAYER)
    torch.testing.assert_close(encoding.weight(parts), meant, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_groups_of_another_size_than_the_format_says(name: str) -> None:
    parts, _ = FORMATS[name].weights(matrix())
    wrong = read_format(FORMATS[name].config | dict(group_size=64)).find_encoding(LAYER)
    with pytest.raises(EncodingError, match=r"of shape \[3, 256\], but its weight needs \[6, 256\]"):
        wrong.weight(parts)
    unsaid = {key: value for key, value in FORMATS[name].config.items() if key != "group_size"}
    assert read_format(unsaid).find_encoding(LAYER).weight(parts).shape == (256, 384)
    with pytest.raises(EncodingError, match="has 5 groups of 576 inputs, and config"):
        read_format(unsaid).find_encoding(LAYER).weight(cut_to_576(name)[0])


@pytest.mark.parametrize("name", ["ct-fp8-dynamic", "fp8-block"])
def test_scales_below_zero(name: str) -> None:
    parts, _ = FORMATS[name].weights(matrix())
    scale = next(part for part in parts if part != "weight")
    parts[scale][1, 0] *= -1
    encoding = read_format(FORMATS[name].config).find_encoding(LAYER)
    for read in (encoding.weight, encoding.fp8_rows):
        with pytest.raises(EncodingError, match="has scales below 0"):
            read(parts)


def rounding_of(weights: dict[str, Any], weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight with scales, zero points and group indices, as its state is before it is compressed."""
    rows, columns = weight.shape
    blocks = {"tensor": (rows, columns), "channel": (1, columns), "block": (GROUP, GROUP)}
    height, width = blocks.get(weights["strategy"], (1, weights.get("group_size", 1)))
    shape = (1,) if weights["strategy"] == "tensor" else (-(-rows // height), -(-columns // width))
    highest = 448 if weights["type"] == "float" else 2 ** (weights["num_bits"] - 1) - 1
    spread = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    found = {"weight": weight, "weight_scale": spread * weight.abs().max() / highest}
    if not weights.get("symmetric", True):
        found["weight_zero_point"] = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(2)).to(
            torch.int8
        )
    if weights.get("actorder") in ("group", "dynamic"):
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(3))
        found["weight_g_idx"] = (torch.arange(columns, dtype=torch.int32) // width)[order]
    return found


# ---- what does not fit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("name", "part", "change", "reason"),
    [
        ("fp8-block", "weight_scale_inv", lambda scale: scale.t(), "scales or zero points of shape"),
        ("ct-w4a16", "weight_packed", lambda words: words[:, 17:], "scales or zero points of shape"),
        ("ct-w4a16", "weight_packed", lambda words: words.flatten(), "of 1 dimensions"),
        ("gptq", "qzeros", lambda words: words[:, 1:], "integers of 4 or 8 bits"),
        ("gptq-desc-act", "g_idx", lambda indices: indices[1:], "383 group indices for 384 inputs"),
        ("gptq-desc-act", "qzeros", lambda words: words[1:], "scales or zero points of shape"),
        ("ct-w4a16-asym", "weight_zero_point", lambda words: words[:, 1:], "scales or zero points of shape"),
    ],
)
def test_tensors_that_do_not_fit(name: str, part: str, change: Any, reason: str, device: str) -> None:
    """On a CPU, and without data, as they are known from a file's header."""
    parts, _ = FORMATS[name].weights(matrix())
    changed = parts | {part: change(parts[part])}
    encoding = read_format(FORMATS[name].config).find_encoding(LAYER)
    with pytest.raises(EncodingError, match=reason) as found:
        encoding.weight({key: tensor.to(device) for key, tensor in changed.items()})
    assert len(str(found.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        (dict(quant_method="bitsandbytes"), "are in bitsandbytes"),
        (dict(quant_method="gptq", sym=False), "zero points in GPTQ's original layout"),
        (dict(quant_method="gptq", checkpoint_format="marlin"), "GPTQ's layout marlin"),
        (dict(quant_method="awq", bits=8), "AWQ with other than 4 bits"),
        (dict(quant_method="modelopt", quant_algo="W4A8_AWQ"), "ModelOpt's W4A8_AWQ"),
        (compressed("marlin-24", CT_W4), "4-bit int numbers in the layout marlin-24"),
        (compressed("pack-quantized", CT_W4) | dict(sparsity_config=dict(format="sparse-24-bitmask")), "are sparse"),
        (compressed("pack-quantized", CT_W4) | dict(transform_config=dict(config_groups=dict(a={}))), "transforms of"),
        (compressed("pack-quantized", numbers(4, "int", "group")), r"unsupported way \(KeyError: 'group_size'\)"),
        (compressed("pack-quantized", CT_W4 | dict(num_bits=None)), r"unsupported way \(TypeError: int\(\) argument"),
        (
            compressed("float-quantized", BLOCKS | dict(block_structure="128")),
            r"unsupported way \(ValueError: not enough",
        ),
        (
            compressed("pack-quantized", CT_W4) | dict(ignore=["re:*gate"]),
            r"unsupported way \(error: nothing to repeat",
        ),
        (
            compressed("pack-quantized", "int4"),
            r"unsupported way \(\w+: string indices|unsupported way \(AttributeError",
        ),
        (dict(quant_method="awq", bits=None), r"unsupported way \(TypeError"),
        (dict(quant_method="gptq", group_size=0), "scales of 0 numbers each"),
        (dict(quant_method="fp8", weight_block_size=[128]), r"unsupported way \(IndexError"),
    ],
)
def test_formats_that_are_not_read(described: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnknownFormatError, match=reason) as found:
        read_format(described)
    assert len(str(found.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("described", "is_native"),
    [
        (FORMATS["ct-w4a16"].config, True),
        (FORMATS["ct-w4a16-asym"].config, True),
        (FORMATS["awq"].config, True),
        (FORMATS["gptq"].config, True),
        (FORMATS["auto-round"].config, True),
        (FORMATS["auto-round"].config | dict(extra_config={"model.layers.0.mlp.up_proj": dict(bits=8)}), False),
        (FORMATS["gptq-int8"].config, False),
        (FORMATS["gptq-desc-act"].config, False),
        (FORMATS["gptq"].config | dict(group_size=-1), False),
        (FORMATS["ct-w8a16"].config, False),
        (compressed("pack-quantized", CT_W4 | dict(actorder="group")), False),
        (compressed("pack-quantized", CT_W4, numbers(8, "int", "token", True)), False),
        ({key: value for key, value in AWQ.items() if key != "group_size"}, False),
    ],
)
def test_four_bits_are_kept_in_groups_in_order(described: dict[str, Any], is_native: bool) -> None:
    assert (read_format(described).native == UINT4) == is_native


def test_layers_with_encodings_of_their_own() -> None:
    described = compressed("pack-quantized", CT_W4)
    described["config_groups"]["group_1"] = dict(
        targets=["re:.*down_proj$", "model.layers.1.mlp.up_proj"],
        weights=numbers(8, "float", "channel"),
        format="float-quantized",
    )
    found = read_format(described)
    assert found.find_encoding("model.layers.0.mlp.up_proj").parts[0] == "weight_packed"
    assert found.find_encoding("model.layers.0.mlp.down_proj").parts[0] == "weight"
    assert found.find_encoding("model.layers.1.mlp.up_proj").parts[0] == "weight"

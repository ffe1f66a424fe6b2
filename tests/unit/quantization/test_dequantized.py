"""Quantized checkpoints as vLLM's configuration sees them, and how their files are read."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from card_emulator.gaudi.fused import convert_from_uint4
from tests.models.formats import CT_FP8, CT_W4, FORMATS, GROUP, compressed, fp8_channel
from tests.unit.quantization.test_kv_scheme import checkpoint, configured
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.quantization.checkpoint import Checkpoint, check_tensors
from vllm_gaudi_spec.quantization.dequantized import DEQUANTIZED
from vllm_gaudi_spec.quantization.encodings import EncodingError, Words
from vllm_gaudi_spec.quantization.formats import read_format
from vllm_gaudi_spec.quantization.method import DequantizedConfig

CT = compressed("float-quantized", *CT_FP8)
NAME = "model.layers.0.mlp.up_proj"


def reference(**options: Any) -> dict[str, Any]:
    return kernels("reference") | options


def kernels(which: str) -> dict[str, Any]:
    return dict(additional_config=dict(gaudi_spec=dict(weight_kernels=which)))


def test_vllm_uses_our_method(tmp_path: Path) -> None:
    """In float32 too, which vLLM's own method for the format refuses."""
    found = configured(checkpoint(tmp_path, dict(FORMATS["fp8-block"].config)), **reference())
    assert found.model_config.quantization == DEQUANTIZED
    assert isinstance(found.quant_config, DequantizedConfig)
    # For another process, and for heads, whose models ask for it again.
    assert isinstance(copy.deepcopy(found.quant_config), DequantizedConfig)
    again = VllmConfig.get_quantization_config(found.model_config, found.load_config)
    assert isinstance(again, DequantizedConfig)


def test_unsupported_format_is_refused(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, FORMATS["gptq"].config | dict(checkpoint_format="gptq", sym=False))
    with pytest.raises(UnsupportedConfigError, match="zero points in GPTQ's original layout") as refused:
        configured(model, dtype="bfloat16")
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(("which", "method"), [("reference", DEQUANTIZED), ("native", "compressed-tensors")])
def test_damaged_checkpoint_is_refused_at_configuration(
    which: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every CPU has vLLM's kernels for int8 in bfloat16."""
    monkeypatch.setattr(type(current_platform), "supported_dtypes", [torch.bfloat16])
    options = kernels(which) | dict(dtype="bfloat16")
    model = checkpoint(tmp_path, dict(FORMATS["ct-int8"].config))
    parts, _ = FORMATS["ct-int8"].weights(torch.ones(GROUP, GROUP))
    for scale, reason in (
        ({}, "no weight_scale; download or copy"),
        ({"weight_scale": torch.ones(7, 1)}, "scales or"),
    ):
        save_file(tensors_of({"weight": parts["weight"]} | scale), tmp_path / "model.safetensors")
        with pytest.raises(UnsupportedConfigError, match=f"layer {NAME} has {reason}") as refused:
            configured(model, **options)
        assert len(str(refused.value).splitlines()) == 1
    save_file(tensors_of(parts), tmp_path / "model.safetensors")
    assert configured(model, **options).model_config.quantization == method


def test_other_load_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfigError, match="--load-format sharded_state; leave it out"):
        configured(checkpoint(tmp_path, dict(CT)), **reference(load_format="sharded_state"))


# ---- reading ---------------------------------------------------------------------------------------------


def read(
    tensors: dict[str, torch.Tensor], config: dict[str, Any] = CT, dtype: torch.dtype = torch.float32, **more: Any
) -> dict[str, torch.Tensor]:
    made = Checkpoint(model="model", format=read_format(config), dtype=dtype, **more)
    return dict(made.weights(tensors.items()))


def tensors_of(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{NAME}.{part}": tensor for part, tensor in parts.items()}


def test_tensors_may_come_in_any_order() -> None:
    parts, meant = FORMATS["ct-w4a16"].weights(torch.randn(GROUP, GROUP))
    found = read(dict(reversed(tensors_of(parts).items())), compressed("pack-quantized", CT_W4))
    torch.testing.assert_close(found[f"{NAME}.weight"], meant)


READ = [name for name, format in FORMATS.items() if format.weights is not None]
SCALES = [
    pytest.param(name, part, keeps, id=f"{name}-{part}{'-kept' * keeps}")
    for name in READ
    for part, tensor in FORMATS[name].weights(torch.ones(GROUP, GROUP))[0].items()
    if "scale" in part and part != "input_scale"
    for keeps in ([False, True] if read_format(FORMATS[name].config).native else [False])
]
"""Every scale of every format; the weights decoded, and kept as they are where a device may keep them."""


def changed(name: str, part: str, change: Callable[[torch.Tensor], Any]) -> tuple[dict[str, torch.Tensor], Any]:
    """Tensors of a layer of ones with one changed, or without it; and what they stood for."""
    parts, meant = FORMATS[name].weights(torch.ones(2 * GROUP, 2 * GROUP))
    parts[part] = change(parts[part].clone())
    return tensors_of({key: tensor for key, tensor in parts.items() if tensor is not None}), meant


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def put(scale: torch.Tensor) -> torch.Tensor:
        stored = value
        if scale.dtype == torch.uint8:  # an exponent of two: 0 is the smallest number, and 255 is none
            stored = 0 if value == 0 else 255
        elif scale.dtype == torch.float8_e4m3fn and value != 0:  # which has no infinity
            stored = float("nan")
        scale.view(-1)[0] = stored
        return scale

    return put


def kept_or_decoded(found: dict[str, torch.Tensor]) -> torch.Tensor:
    if (weight := found.get(f"{NAME}.weight")) is not None:
        return weight.float() * found.get(f"{NAME}.weight_scale", 1)
    words = Words(*(found[f"{NAME}.weight_{part}"] for part in ("packed", "scale", "zero_point")))
    return convert_from_uint4(words.weight_KW, words.scales_GN, words.zeros_GW, torch.float32).t()


@pytest.mark.parametrize(("name", "part", "keeps"), SCALES)
def test_zero_scale_gives_finite_weights(name: str, part: str, keeps: bool) -> None:
    """It makes zeros of the weights that share it, and changes no other."""
    tensors, meant = changed(name, part, first(0.0))
    if part == "weight_global_scale":  # which divides
        with pytest.raises(EncodingError, match="scales or values that are not finite"):
            read(tensors, dict(FORMATS[name].config))
        return
    found = read(tensors, dict(FORMATS[name].config), is_native=lambda layer: keeps)
    assert (f"{NAME}.weight_scale" in found) == keeps
    weight = kept_or_decoded(found)
    is_zero = weight.abs() < 1e-30
    torch.testing.assert_close(weight[~is_zero], meant[~is_zero], rtol=1e-6, atol=1e-6)
    whole = tensors[f"{NAME}.{part}"].numel()
    assert int(is_zero.sum()) == is_zero.numel() // whole


@pytest.mark.parametrize(("name", "part", "keeps"), SCALES)
def test_non_finite_scales_are_refused(name: str, part: str, keeps: bool) -> None:
    for value in (float("nan"), float("inf")):
        tensors, _ = changed(name, part, first(value))
        if part == "weight_global_scale" and value == float("inf"):  # which divides: the weights are zeros
            assert not read(tensors, dict(FORMATS[name].config))[f"{NAME}.weight"].any()
            continue
        with pytest.raises(
            EncodingError, match=f"model: layer {NAME} has scales or values that are not finite; download"
        ):
            read(tensors, dict(FORMATS[name].config), is_native=lambda layer: keeps)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("name", "part", "keeps"), SCALES)
def test_wrong_number_of_scales_is_refused(name: str, part: str, keeps: bool, device: str) -> None:
    """By the headers of the files alone, too."""
    for change, reason in (
        (lambda scale: None, f"has no {part}"),
        (lambda scale: torch.cat((scale.reshape(-1, *scale.shape[1:]),) * 2), "has "),
    ):
        tensors, _ = changed(name, part, change)
        there = {key: tensor.to(device) for key, tensor in tensors.items()}
        with pytest.raises(EncodingError, match=f"model: layer {NAME} {reason}.*; download or copy"):
            read(there, dict(FORMATS[name].config), is_native=lambda layer: keeps)


@pytest.mark.parametrize("name", ["ct-int8", "ct-w4a16", "awq", "gptq", "fp8-block"])
def test_tensors_for_vllms_kernels_are_checked(name: str) -> None:
    """And not changed."""
    format = read_format(FORMATS[name].config)
    parts, _ = FORMATS[name].weights(torch.ones(GROUP, GROUP))
    tensors = tensors_of(parts)
    assert dict(check_tensors("model", format, tensors.items())) == tensors
    (scale,) = (key for key in tensors if "scale" in key)
    without = {key: tensor for key, tensor in tensors.items() if key != scale}
    with pytest.raises(
        EncodingError, match=f"model: layer {NAME} has no {scale.removeprefix(NAME)[1:]}; download or copy"
    ):
        list(check_tensors("model", format, without.items()))
    broken = tensors | {scale: tensors[scale] * float("nan")}
    with pytest.raises(EncodingError, match=f"model: {scale} has values that are not finite; download or copy"):
        list(check_tensors("model", format, broken.items()))


E4M3 = torch.ones(4, 4).to(torch.float8_e4m3fn)
NAMED = compressed("float-quantized", *CT_FP8)
NAMED["config_groups"]["group_0"]["targets"] = ["re:.*down_proj$"]


@pytest.mark.parametrize(
    ("name", "tensor", "config"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj", torch.ones(2, 4, 4).to(torch.float8_e4m3fn), CT),
        ("model.layers.0.mlp.experts.gate_up_proj_scale_inv", torch.ones(2, 1, 1), CT),
        ("model.layers.0.mlp.experts.gate_up_proj_weight_scale", torch.ones(2), dict(FORMATS["modelopt-fp8"].config)),
        ("model.layers.0.mlp.experts.down_proj_packed", torch.ones(2, 4, dtype=torch.int32), CT),
        (f"{NAME}.weight_g_idx", torch.ones(4, dtype=torch.int32), compressed("pack-quantized", CT_W4)),
        (f"{NAME}.qweight", torch.ones(4, 4, dtype=torch.int32), CT),
        (f"{NAME}.weight", E4M3, NAMED),
    ],
)
def test_undescribed_quantized_tensors_are_refused(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> None:
    with pytest.raises(
        EncodingError, match=rf"model: {name} is quantized in a way that config.json .*; use a model in"
    ):
        read({name: tensor}, config)
    assert not read({name: tensor}, config, is_unused=lambda unused: unused == name)


def test_stacked_experts_of_gpt_oss() -> None:
    """Under the names that they have in a model in bfloat16; biases, sinks and the rest as they are."""
    format = FORMATS["gpt-oss-mxfp4"]
    experts = "model.layers.0.mlp.experts"
    parts, meant = format.stacks(torch.randn(2, 64, 8))
    others = {
        f"{experts}.gate_up_proj_bias": torch.ones(2, 8),
        "model.layers.0.self_attn.sinks": torch.ones(4),
        "model.layers.0.self_attn.q_proj.weight": torch.ones(4, 4),
    }
    tensors = {f"{experts}.gate_up_proj_{part}": tensor for part, tensor in parts.items()}
    found = read(tensors | others, dict(format.config))
    torch.testing.assert_close(found.pop(f"{experts}.gate_up_proj"), meant)
    assert found.keys() == others.keys()
    parts["scales"][0, 3, 1] = 255  # no number
    with pytest.raises(EncodingError, match=f"layer {experts}.gate_up_proj has scales or values that are not finite"):
        read(tensors, dict(format.config))
    other = {"model.layers.0.mlp.w1_blocks": parts["blocks"]}
    with pytest.raises(EncodingError, match="does not describe"):
        read(other, dict(format.config))


@pytest.mark.parametrize("names", [("weight_scale_inv", "activation_scale"), ("qscale_weight", "qscale_act")])
def test_other_names_of_scales(names: tuple[str, str]) -> None:
    parts, meant = FORMATS["fp8-tensor-static"].weights(torch.randn(GROUP, GROUP))
    renamed = dict(
        zip(("weight", *names), (parts[name] for name in ("weight", "weight_scale", "input_scale")), strict=True)
    )
    kv = {"layers.0.attention.kv_fake_quantizer.qscale_act": torch.ones(1)}
    found = read(tensors_of(renamed) | kv, dict(FORMATS["fp8-tensor-static"].config))
    torch.testing.assert_close(found.pop(f"{NAME}.weight"), meant)
    assert found == kv


def test_values_beyond_the_models_dtype_are_refused() -> None:
    parts, _ = fp8_channel(torch.ones(GROUP, GROUP))
    parts["weight_scale"][3] = 1e4
    assert bool(read(tensors_of(parts), dtype=torch.bfloat16)[f"{NAME}.weight"].isfinite().all())
    with pytest.raises(EncodingError, match=f"layer {NAME} has values beyond float16; use --dtype bfloat16"):
        read(tensors_of(parts), dtype=torch.float16)

"""In which dtype KV is kept: by the user, by checkpoints, by the device; and scales that are none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from vllm.config import VllmConfig
from vllm.config.utils import replace
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from tests.full_tests.tiny_models import common
from tests.support.releases import only_0_32
from vllm_gaudi_spec.config import FP8_KV, UnsupportedConfigError
from vllm_gaudi_spec.devices.base import Weights
from vllm_gaudi_spec.devices.cpu import formats as cpu_formats
from vllm_gaudi_spec.devices.cpu.backend import CpuWeights
from vllm_gaudi_spec.quantization import kv_scheme
from vllm_gaudi_spec.quantization.kv_scheme import drop_scales_set_aside

SCHEME = dict(num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False)
INT8 = dict(num_bits=8, type="int", strategy="channel", symmetric=True, dynamic=False)
INT8_TOKENS = dict(num_bits=8, type="int", strategy="token", symmetric=True, dynamic=True)
COMPRESSED = dict(
    quant_method="compressed-tensors",
    format="int-quantized",
    ignore=["lm_head"],
    config_groups=dict(group_0=dict(targets=["Linear"], weights=INT8, input_activations=INT8_TOKENS)),
)
MODELOPT = dict(quant_method="modelopt", quant_algo="FP8", kv_cache_quant_algo="FP8", ignore=["lm_head"])


def checkpoint(folder: Path, quantization: dict[str, Any] | None) -> str:
    described = {} if quantization is None else dict(quantization_config=quantization)
    LlamaConfig(**common(), architectures=["LlamaForCausalLM"], **described).save_pretrained(folder)
    return str(folder)


def with_scheme(**changes: Any) -> dict[str, Any]:
    return COMPRESSED | dict(kv_cache_scheme=SCHEME | changes)


def configured(model: str, **options: Any) -> VllmConfig:
    defaults = dict(dtype="float32", max_model_len=512, skip_tokenizer_init=True)
    return EngineArgs(model, **(defaults | options)).create_engine_config()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(kv_scheme.logger, "warning_once", lambda text, *values: said.append(text % values))
    return said


def test_supported_scheme_sets_fp8_kv(tmp_path: Path, warnings: list[str]) -> None:
    for strategy in ("tensor", "attn_head"):
        made = configured(checkpoint(tmp_path, with_scheme(strategy=strategy)))
        assert made.cache_config.cache_dtype == FP8_KV
        assert made.quant_config.kv_cache_scheme["strategy"] == strategy
    assert not warnings


@pytest.mark.parametrize("change", [dict(type="int"), dict(symmetric=False), dict(strategy="channel")])
@pytest.mark.parametrize("requested", ["auto", "fp8"])
def test_unsupported_scheme_is_dropped(
    requested: str, change: dict[str, Any], tmp_path: Path, warnings: list[str]
) -> None:
    made = configured(checkpoint(tmp_path, with_scheme(**change)), kv_cache_dtype=requested)
    assert made.cache_config.cache_dtype == ("auto" if requested == "auto" else FP8_KV)
    # What the layers look at, and what another configuration of the same model would be made of.
    assert made.quant_config.kv_cache_scheme is None
    assert replace(made, quant_config=None).quant_config.kv_cache_scheme is None
    kept = "float32" if requested == "auto" else FP8_KV
    (line,) = set(warnings)
    assert line.startswith(
        f"{tmp_path} requests a quantized KV cache that is not supported here: KV is kept in {kept}, "
    )


def test_scheme_is_dropped_on_device_without_fp8(
    tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuWeights, "fp8_arithmetic", None)
    made = configured(checkpoint(tmp_path, with_scheme()))
    assert made.cache_config.cache_dtype == "auto"
    assert made.quant_config.kv_cache_scheme is None
    assert "KV is kept in float32" in warnings[0]
    with pytest.raises(UnsupportedConfigError, match="dtype on cpu, got fp8_e4m3; use --kv-cache-dtype auto"):
        configured(checkpoint(tmp_path, None), kv_cache_dtype="fp8")
    assert Weights.fp8_arithmetic is None  # of devices that say nothing else: Ascend and CUDA


@pytest.mark.parametrize("has_fp8", [True, False])
def test_modelopts_formats(has_fp8: bool, tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes their dtype before the platform is asked. float32 is not for these weights, nor every CPU."""
    monkeypatch.setattr(cpu_formats, "missing_kernel", lambda *_: None)
    monkeypatch.setattr(type(current_platform), "supported_dtypes", [torch.bfloat16])
    if not has_fp8:
        monkeypatch.setattr(CpuWeights, "fp8_arithmetic", None)
    made = configured(checkpoint(tmp_path, MODELOPT), dtype="bfloat16")
    assert made.cache_config.cache_dtype == (FP8_KV if has_fp8 else "auto")
    assert bool(warnings) != has_fp8


def test_user_can_keep_kv_in_models_dtype(tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "supported_dtypes", [torch.bfloat16])
    made = configured(checkpoint(tmp_path, with_scheme()), dtype="bfloat16", kv_cache_dtype="bfloat16")
    assert made.cache_config.cache_dtype == "auto"
    assert made.quant_config.kv_cache_scheme is None
    assert not warnings


def test_scales_of_dropped_scheme_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "supported_dtypes", [torch.bfloat16])
    model = checkpoint(tmp_path, with_scheme(strategy="attn_head"))
    attention, scale = "model.layers.0.self_attn.", torch.ones(2, 1, 1)
    of_schemes = {f"{attention}{which}_{part}": scale for which in "qkv" for part in ("scale", "zero_point")}
    others = {f"{attention}k_proj.weight_scale": scale, "model.norm.weight": scale}
    for requested, expected in (("auto", of_schemes | others), ("bfloat16", others)):
        read = configured(model, dtype="bfloat16", kv_cache_dtype=requested).model_config
        assert dict(drop_scales_set_aside((of_schemes | others).items(), read)).keys() == expected.keys()


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (dict(kv_cache_dtype="fp8_e5m2"), r"in FP8 \(e4m3\), got fp8_e5m2; use --kv-cache-dtype auto or fp8\."),
        pytest.param(
            dict(kv_cache_dtype="bfloat16"), "got bfloat16; use --kv-cache-dtype auto or fp8", marks=only_0_32
        ),
        (dict(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["0"]), "leave out --kv-cache-dtype-skip-layers"),
    ],
    ids=str,
)
def test_other_dtypes_are_refused(options: dict[str, Any], remedy: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfigError, match=remedy):
        configured(checkpoint(tmp_path, None), **options)


def test_a_drafter_keeps_kv_as_its_target_does(tmp_path: Path, warnings: list[str]) -> None:
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    for folder, quantization in ((target, dict(COMPRESSED)), (drafter, with_scheme())):
        folder.mkdir()
        checkpoint(folder, quantization)
    speculation = dict(method="draft_model", model=str(drafter), num_speculative_tokens=2)
    made = configured(str(target), speculative_config=speculation)
    described = made.speculative_config.draft_model_config
    assert described.hf_config.quantization_config["kv_cache_scheme"] is None
    assert f"{drafter} requests a quantized KV cache" in warnings[0]
    warnings.clear()
    made = configured(str(target), speculative_config=speculation, kv_cache_dtype="fp8")
    described = made.speculative_config.draft_model_config
    assert described.hf_config.quantization_config["kv_cache_scheme"]["strategy"] == "tensor"
    assert not warnings


@pytest.mark.parametrize(
    ("scale", "fault"),
    [
        (torch.zeros(1), "is 0, but a scale must be a finite number above 0"),
        (torch.tensor(-1.0), "is -1, but"),
        (torch.tensor(torch.nan), "is nan, but"),
        (torch.tensor([torch.inf]).bfloat16(), "is inf, but"),
        (torch.ones(2), r"has shape \[2\], but its size must be 1"),
        (torch.ones(0), r"has shape \[0\], but"),
    ],
    ids=["zero", "negative", "nan", "inf", "two", "none"],
)
def test_hostile_scales_are_refused(scale: torch.Tensor, fault: str, tmp_path: Path) -> None:
    model = checkpoint(tmp_path, with_scheme())
    for name in _NAMES if scale.numel() == 1 and scale.item() == 0 else _NAMES[:1]:
        save_file({"model.layers.0.self_attn.q_scale": torch.zeros(1), name: scale}, tmp_path / "model.safetensors")
        with pytest.raises(UnsupportedConfigError, match=rf"^{name} in .*model\.safetensors {fault}"):
            configured(model)


_NAMES = [
    f"model.layers.1.self_attn.{name}"
    for name in ("k_scale", "v_proj.v_scale", "kv_scale", "k_cache.scale", "k_proj.output_scale")
]


def test_float16_weights_with_fp8_kv_are_refused(tmp_path: Path) -> None:
    options = dict(additional_config={"gaudi_spec": {"cpu_weights": "float16"}})
    configured(checkpoint(tmp_path, None), **options)
    with pytest.raises(UnsupportedConfigError, match="cpu_weights float16 may round KV to FP8 differently"):
        configured(checkpoint(tmp_path, None), kv_cache_dtype="fp8", **options)


def test_scales_by_head(tmp_path: Path) -> None:
    model, name = checkpoint(tmp_path, with_scheme(strategy="attn_head")), "model.layers.0.self_attn.k_scale"
    heads = configured(model).model_config.get_total_num_kv_heads()
    save_file({name: torch.ones(heads, 1, 1)}, tmp_path / "model.safetensors")
    configured(model)
    save_file({name: torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedConfigError, match=rf"has shape \[1\], but its size must be {heads}"):
        configured(model)

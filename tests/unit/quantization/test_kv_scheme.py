"""Checkpoints that ask for FP8 KV are served with KV in the model's dtype, and the user is warned what that costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from vllm.config import VllmConfig
from vllm.config.utils import replace
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from tests.full_tests.tiny_models import common
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.cpu import formats as cpu_formats
from vllm_gaudi_spec.quantization import kv_scheme

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


def checkpoint(folder: Path, quantization: dict[str, Any]) -> str:
    made = LlamaConfig(**common())
    made.architectures = ["LlamaForCausalLM"]
    made.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | dict(quantization_config=quantization)))
    return str(folder)


def configured(model: str, **options: Any) -> VllmConfig:
    defaults = dict(dtype="float32", max_model_len=512, skip_tokenizer_init=True)
    return EngineArgs(model, **(defaults | options)).create_engine_config()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(kv_scheme.logger, "warning_once", lambda text, *values: said.append(text % values))
    return said


def test_the_scheme_is_set_aside_with_what_it_costs(tmp_path: Path, warnings: list[str]) -> None:
    made = configured(checkpoint(tmp_path, COMPRESSED | dict(kv_cache_scheme=SCHEME)))
    assert made.cache_config.cache_dtype == "auto"
    # What the layers look at, and what another configuration of the same model would be made of.
    assert made.quant_config.kv_cache_scheme is None
    assert replace(made, quant_config=None).quant_config.kv_cache_scheme is None
    assert len(set(warnings)) == 1
    assert warnings[0] == (
        f"{tmp_path} asks for a quantised KV cache, which is not supported yet: KV is kept in float32, which takes 4 "
        "times the memory of 8 bits, and its scales are not used."
    )


def test_one_without_a_scheme_is_left_alone(tmp_path: Path, warnings: list[str]) -> None:
    made = configured(checkpoint(tmp_path, dict(COMPRESSED)))
    assert made.cache_config.cache_dtype == "auto"
    assert not warnings


def test_modelopts_formats(tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes their dtype before the platform is asked. float32 is not for these weights, nor every CPU."""
    monkeypatch.setattr(cpu_formats, "missing_kernel", lambda *_: None)
    monkeypatch.setattr(type(current_platform), "supported_dtypes", [torch.bfloat16])
    made = configured(checkpoint(tmp_path, MODELOPT), dtype="bfloat16")
    assert made.cache_config.cache_dtype == "auto"
    assert "KV is kept in bfloat16, which takes 2 times" in warnings[0]


def test_who_asks_for_fp8_kv_is_refused_still(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfigError, match="use --kv-cache-dtype auto"):
        configured(checkpoint(tmp_path, COMPRESSED | dict(kv_cache_scheme=SCHEME)), kv_cache_dtype="fp8")


def test_a_drafters_scheme_too(tmp_path: Path, warnings: list[str]) -> None:
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    for folder, quantization in ((target, dict(COMPRESSED)), (drafter, COMPRESSED | dict(kv_cache_scheme=SCHEME))):
        folder.mkdir()
        checkpoint(folder, quantization)
    speculation = dict(method="draft_model", model=str(drafter), num_speculative_tokens=2)
    made = configured(str(target), speculative_config=speculation)
    described = made.speculative_config.draft_model_config
    assert described.hf_config.quantization_config["kv_cache_scheme"] is None
    assert f"{drafter} asks for a quantised KV cache" in warnings[0]

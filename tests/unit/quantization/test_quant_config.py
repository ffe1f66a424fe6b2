"""QUANT_CONFIG files: what is read, which modules are taken, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.quantization.config import QuantConfig


def read(folder: Path, **fields: Any) -> QuantConfig:
    path = folder / "quant.json"
    path.write_text(json.dumps({"mode": "QUANTIZE", "dump_stats_path": "some/inc", **fields}))
    return QuantConfig.read(str(path), "QUANT_CONFIG")


def test_a_gaudi_users_file(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        method="HOOKS",
        mode="measure",
        observer="maxabs",
        scale_method="maxabs_pow2",
        measure_exclude="NONE",
        ignore_modules_wo_measures="True",
    )
    assert config.measures
    assert config.measures_outputs
    assert config.skips_unknown
    assert (config.scale_method, config.dump_stats_path) == ("maxabs_pow2", "some/inc")
    assert not list(config.unsimulated_refusals())
    plain = read(tmp_path)
    assert (plain.measures, plain.measures_outputs, plain.skips_unknown) == (False, False, False)
    assert plain.scale_method == "maxabs_hw"


@pytest.mark.parametrize(
    ("lists", "taken"),
    [
        ({}, "qkv lm_head matmul"),
        ({"blocklist": {"names": ["lm_head"], "types": []}}, "qkv matmul"),
        ({"blacklist": {"names": ["lm_head"]}}, "qkv matmul"),
        ({"blocklist": {"types": ["Matmul"], "names": [r"layers\.\d+\.self_attn\.qkv"]}}, "lm_head"),
        ({"allowlist": {"types": ["Matmul"], "names": []}}, "matmul"),
        ({"allowlist": {"types": [], "names": ["self_attn"]}, "blocklist": {"types": ["Matmul"]}}, "qkv"),
    ],
    ids=str,
)
def test_which_modules_are_taken(lists: dict[str, Any], taken: str, tmp_path: Path) -> None:
    modules = {
        "qkv": ("model.layers.3.self_attn.qkv_proj", "QKVParallelLinear"),
        "lm_head": ("lm_head", "ParallelLMHead"),
        "matmul": ("model.layers.3.self_attn.attn.impl.matmul_qk", "Matmul"),
    }
    config = read(tmp_path, **lists)
    assert [short for short, module in modules.items() if config.takes(*module)] == taken.split()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (dict(observer="maxabs_per_channel"), "observer maxabs_per_channel"),
        (dict(fp8_config="E5M2"), "use e4m3"),
        (dict(dynamic_quantization=True), "use false"),
        (dict(scale_method={"default": "maxabs_hw"}), "one name"),
        (dict(use_qdg=True), "use_qdg"),
    ],
    ids=str,
)
def test_what_only_a_gaudi_can_do(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (said,) = read(tmp_path, **fields).unsimulated_refusals()
    assert reason in said


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not a JSON file"),
        ("[]", "one JSON object"),
        ('{"mode": "LOAD", "dump_stats_path": "x"}', "got LOAD"),
        ('{"dump_stats_path": "x"}', "got none"),
        ('{"mode": "MEASURE"}', "dump_stats_path"),
        (None, "cannot be read"),
    ],
    ids=str,
)
def test_unusable_files(content: str | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "quant.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UnsupportedConfigError, match=reason) as refused:
        QuantConfig.read(str(path), "QUANT_CONFIG")
    assert str(refused.value).startswith("QUANT_CONFIG: ")
    assert len(str(refused.value).splitlines()) == 1

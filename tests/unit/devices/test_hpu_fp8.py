"""The calls of Intel Neural Compressor on a Gaudi, to a stand-in for both."""

import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.quantization.test_quant_config import read
from vllm_gaudi_spec.attention.operations import VLLMKVCache
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.hpu import fp8 as hpu_fp8
from vllm_gaudi_spec.quantization.config import LoadContext, QuantConfig


class Impl(nn.Module):
    kv_dtype = None

    def __init__(self) -> None:
        super().__init__()
        self.k_cache = VLLMKVCache()


class PatchedCache(nn.Module):
    pass


class Model(nn.Module):
    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self.first, self.second, self.lm_head = Impl(), Impl(), nn.Linear(2, 2)
        self.log = log

    def to(self, *where: Any) -> "Model":
        self.log.append(where)
        return self


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def patch(mode: str, model: Model, path: str) -> None:
        calls.append((mode, json.loads(Path(path).read_text())))
        if mode == "convert":
            model.first.k_cache = PatchedCache()

    inc = SimpleNamespace(
        FP8Config=SimpleNamespace(from_json_file=lambda path: path),
        prepare=lambda model, path: patch("prepare", model, path),
        convert=lambda model, path: patch("convert", model, path),
        finalize_calibration=lambda model: calls.append("finalize"),
    )
    core = SimpleNamespace(
        hpu_inference_set_env=lambda: calls.append("set_env"),
        hpu_initialize=lambda model, mark_only_scales_as_const: calls.append(("initialize", mark_only_scales_as_const)),
    )
    modules = {"neural_compressor.torch.quantization": inc, "habana_frameworks.torch.core": core}
    monkeypatch.setattr(importlib, "import_module", modules.__getitem__)
    return calls


def given(folder: Path, mode: str) -> QuantConfig:
    blocked = {"names": ["gate"], "types": ["T"]}
    return read(folder, mode=mode, dump_stats_path=str(folder / "inc"), blacklist=blocked)


def load_context(*apart: nn.Module) -> LoadContext:
    return LoadContext(model="", rank=0, world=1, fp8_range=None, apart=apart)


def test_q15_q21_q24_measuring(log: list[Any], tmp_path: Path) -> None:
    config = given(tmp_path, "MEASURE")
    hpu_fp8.prepare_loading()
    model = Model(log)
    measured = hpu_fp8.apply(model, config, load_context())
    with measured.counting(torch.ones(1, dtype=torch.bool)):
        measured.write()
    assert log == ["set_env", ("prepare", config.fields), ("hpu",), ("initialize", True), "finalize"]


def test_a_measured_model_lists_its_own_modules(log: list[Any], tmp_path: Path) -> None:
    """If a drafter is measured beside its target, INC lists the modules of both for each."""
    model = Model(log)
    measured = hpu_fp8.apply(model, given(tmp_path, "MEASURE"), load_context())
    assert measured is not None
    model.first.k_cache._mod_extra_config = model.lm_head._mod_extra_config = object()
    model.second.k_cache._mod_extra_config = None  # INC sets this on modules that it does not measure
    listed = tmp_path / "inc_hooks_maxabs_0_1_mod_list.json"
    listed.write_text(json.dumps(["first.k_cache", "lm_head", "model.layers.29.mlp.down_proj"]))
    measured.write()
    assert json.loads(listed.read_text()) == ["first.k_cache", "lm_head"]


def test_quantizing_skips_modules_of_another_model(log: list[Any], tmp_path: Path) -> None:
    model = Model(log)
    assert hpu_fp8.apply(model, given(tmp_path, "QUANTIZE"), load_context(model.lm_head)) is None
    (mode, content), *_ = log
    assert mode == "convert"
    assert "blacklist" not in content
    assert content["blocklist"]["types"] == ["T"]
    blocked = content["blocklist"]["names"]
    taken = [name for name, _ in model.named_modules() if name and not any(re.search(p, name) for p in blocked)]
    assert "lm_head" not in taken
    assert "first.k_cache" in taken
    # Replaced caches hold 8 bits.
    assert (model.first.kv_dtype, model.second.kv_dtype) == (torch.float8_e4m3fn, None)


def test_refusal_without_inc_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "neural_compressor.torch.quantization", None)
    with pytest.raises(UnsupportedConfigError, match=r"QUANT_CONFIG: QUANTIZE on a Gaudi needs .*neural-compressor-pt"):
        hpu_fp8._import(given(tmp_path, "QUANTIZE"))

"""Patches of loading still have their reasons: these fail when upstream moves; then review the patch."""

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from vllm.config import LoadConfig
from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn
from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.utils import AutoWeightsLoader

from tests.support.processes import run_code
from vllm_gaudi_spec import config, upstream

_ON_A_CPU = """
import torch
from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.upstream import loading

try:
    torch.accelerator.empty_cache()
except Exception as error:
    assert "Cannot access accelerator device" in str(error), error
else:
    raise SystemExit("it does not raise")
upstream.answer_accelerator_calls("cpu")
for name in loading._ACCELERATOR_CALLS.keys() - {"get_memory_info"}:
    assert getattr(torch.accelerator, name)() is None, name
free, total = torch.accelerator.get_memory_info()
assert 0 < free < total
"""


def test_accelerator_calls_are_still_made_and_still_raise() -> None:
    assert "torch.accelerator.empty_cache" in inspect.getsource(base_loader)
    run_alone(_ON_A_CPU)


def run_alone(code: str) -> None:
    """In a process in which no other test has installed a card."""
    result = run_code(code)
    assert not result.returncode, result.stderr


_ON_A_GAUDI = """
import torch
import card_emulator
from vllm_gaudi_spec import upstream

card_emulator.install(generation="gaudi2", lazy=True)
assert torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "hpu"
raised = {}
for name in ("empty_cache", "empty_host_cache", "reset_peak_memory_stats", "synchronize", "get_memory_info"):
    try:
        getattr(torch.accelerator, name)()
    except Exception as error:
        raised[name] = str(error)
assert len(raised) == 5, raised
assert raised["empty_cache"] == "Allocator for hpu is not a DeviceAllocator"
upstream.answer_accelerator_calls("hpu")
syncs = card_emulator.device().counters.step.syncs
assert torch.accelerator.empty_cache() is None and torch.accelerator.empty_host_cache() is None
torch.accelerator.synchronize()
assert card_emulator.device().counters.step.syncs == syncs + 1
assert torch.accelerator.get_memory_info() == torch.hpu.mem_get_info()
torch.accelerator.reset_peak_memory_stats()
"""


def test_s01_s02_accelerator_calls_ask_the_platform_and_not_whether_torch_sees_a_card() -> None:
    """Torch sees a Gaudi, and its memory calls raise there: docs/contributing/quirks.md names who saw it."""
    run_alone(_ON_A_GAUDI)


def test_upstream_still_packs_cpu_weights_by_itself() -> None:
    """Fails when upstream can be told which kernel to take: then `choose_cpu_linears` can go."""
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    dispatch = utils.dispatch_cpu_unquantized_gemm
    assert list(inspect.signature(dispatch).parameters) == ["layer", "remove_weight"]
    for module in (linear, vocab_parallel_embedding):  # they import it where they call it, so the patch reaches them
        assert "import dispatch_cpu_unquantized_gemm" in inspect.getsource(module)
        assert not hasattr(module, "dispatch_cpu_unquantized_gemm")
    assert "layer.cpu_linear(x, weight, bias)" in inspect.getsource(utils.cpu_unquantized_gemm)


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_weights_are_never_unpickled(tmp_path: Path) -> None:
    """Where the loader would fall back to pickles, and where it was told to take them."""
    upstream.apply()
    marker = tmp_path / "ran"
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Bomb(marker)))
    for load_format in ("auto", "hf", "pt", "npcache"):
        loader = DefaultModelLoader(LoadConfig(load_format=load_format))
        source = DefaultModelLoader.Source(str(tmp_path), revision=None)
        with pytest.raises(config.UnsupportedConfigError, match=r"are pickles .*use a folder with \*\.safetensors"):
            list(loader._get_weights_iterator(source))
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    loader = DefaultModelLoader(LoadConfig())
    assert [name for name, _ in loader._get_weights_iterator(source)] == ["weight"]
    assert not marker.exists()
    pickle.loads((tmp_path / "model.pt").read_bytes())
    assert marker.exists(), "the pickle of this test does nothing"


def test_upstream_still_falls_back_to_pickles(tmp_path: Path) -> None:
    """When it does not, `refuse_pickled_weights` goes."""
    (tmp_path / "pytorch_model.bin").touch()
    upstreams = inspect.unwrap(DefaultModelLoader._prepare_weights)
    found = upstreams(DefaultModelLoader(LoadConfig()), str(tmp_path), None, None, True, None)
    assert found[1:3] == ([str(tmp_path / "pytorch_model.bin")], False)


class Head(nn.Module):
    """A head whose class, like those of most heads, does not say which weights it loaded."""

    def __init__(self, unloaded: tuple[str, ...]) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 64), nn.LayerNorm(8)
        self._unloaded = unloaded

    def load_weights(self, weights: Any) -> None:
        for name, parameter in self.named_parameters():
            if name not in self._unloaded:
                parameter.data.copy_(torch.ones_like(parameter))


@pytest.mark.parametrize("unloaded", [(), ("second.weight",), ("first.weight", "norm.weight")])
def test_matrices_without_weights_are_listed(unloaded: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DefaultModelLoader, "load_weights", lambda loader, model, model_config: model.load_weights(()))
    head = Head(unloaded)
    found: list[tuple[str, Any]] = []
    with upstream.list_unloaded_matrices(found):
        DefaultModelLoader(LoadConfig()).load_weights(head, None)  # type: ignore[arg-type]
    matrices = [name for name in unloaded if name != "norm.weight"]
    assert found == [(name, head.get_submodule(name.removesuffix(".weight"))) for name in matrices]
    assert all(parameter.isfinite().all() for name, parameter in head.named_parameters() if name not in matrices)


def test_models_still_choose_a_device_themselves() -> None:
    """Fails when upstream's models leave it to the loader: then `device_type_while_loading` can go."""
    from vllm.model_executor.models import deepseek_v2, minicpm

    for module in (deepseek_v2, minicpm):
        assert "current_platform.device_type" in inspect.getsource(module)


def test_kimi_linear_is_still_made_of_kernels() -> None:
    """Fails when upstream's class for other platforms than ROCm has layers that can be replaced."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
    from vllm.models import kimi_k3
    from vllm.models.kimi_k3.amd import linear
    from vllm.models.kimi_k3.nvidia import mla, model

    assert "torch.cuda.Stream()" in inspect.getsource(model.KimiLinearModel.__init__)
    assert not issubclass(mla.MultiHeadLatentAttention, MLAAttention)
    assert issubclass(linear.KimiK3MultiHeadLatentAttentionWrapper, MultiHeadLatentAttentionWrapper)
    upstream.apply_to_models(["KimiLinearForCausalLM"])
    assert kimi_k3.KimiLinearForCausalLM is linear.KimiLinearForCausalLM


def test_olmo_hybrid_still_sets_the_allocator_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when its constructor calls nothing of Triton's: then the patch can go."""
    assert "set_triton_allocator" in inspect.getsource(olmo_gdn_linear_attn.OlmoHybridGatedDeltaNetAttention.__init__)
    original = inspect.unwrap(olmo_gdn_linear_attn.set_triton_allocator)
    with pytest.raises(AttributeError, match="set_allocator"):
        original(torch.device("cpu"))
    monkeypatch.setattr(olmo_gdn_linear_attn, "set_triton_allocator", original)
    upstream.apply_to_models(["OlmoHybridForCausalLM"])
    olmo_gdn_linear_attn.set_triton_allocator(torch.device("cpu"))


_BESIDE_LLVMLITE = """
import llvmlite.binding
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
from vllm_gaudi_spec.devices.cpu.platform import CpuSpecPlatform

CpuSpecPlatform.register_triton_kernel_overrides()
try:
    CpuPlatform.register_triton_kernel_overrides()
except AttributeError as error:
    assert "_lib_fn_wrapper" in str(error), error
else:
    raise AssertionError("upstream finds its kernels: then the method of ours may go")
"""


def test_no_kernels_of_triton_are_looked_for() -> None:
    run_alone(_BESIDE_LLVMLITE)


def test_olmo_hybrid_is_still_not_told_its_convolutions() -> None:
    """Fails when upstream's loader knows them: then the patch can go."""
    upstream.apply_to_models(["OlmoHybridForCausalLM"])
    patched = olmo_gdn_linear_attn._make_fused_conv1d_weight_loader
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(6, 1, 4))
    parts = [torch.full((2, 4), float(part)) for part in (1, 2, 3)]
    for number, part in enumerate(parts):
        part.shard_id = number
    layer.weight.weight_loader = inspect.unwrap(patched)([2, 2, 2], 1, 0)
    with pytest.raises(TypeError):
        AutoWeightsLoader(layer).load_weights([("weight", parts[0])])
    layer.weight.weight_loader = patched([2, 2, 2], 1, 0)
    AutoWeightsLoader(layer).load_weights([("weight", part) for part in parts])
    assert layer.weight[:, 0, 0].tolist() == [1, 1, 2, 2, 3, 3]

"""Which layers keep FP8: those that vLLM makes by the method, and those that the reader leaves as they are."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.models.utils import WeightsMapper
from vllm.utils.torch_utils import set_default_torch_dtype

from tests.models.formats import AWQ, FORMATS, kernels
from vllm_gaudi_spec.config import NATIVE
from vllm_gaudi_spec.quantization import dequantized
from vllm_gaudi_spec.quantization.dequantized import native_layers
from vllm_gaudi_spec.quantization.formats import read_format
from vllm_gaudi_spec.quantization.fp8 import HostArithmetic
from vllm_gaudi_spec.quantization.method import DequantizedConfig
from vllm_gaudi_spec.quantization.native_linears import Fp8Linear, Uint4Linear

FP8 = FORMATS["fp8-block"].config
# As Qwen3-VL-MoE has them.
MAPPER = WeightsMapper(orig_to_new_prefix={"model.language_model.": "language_model.model.", "lm_head.": "lm.lm_head."})
MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@pytest.fixture(autouse=True)
def device_with_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = SimpleNamespace(
        multiplies_fp8=True, fp8_arithmetic=HostArithmetic, fp8_range="gaudi2", converts_uint4=True, from_uint4=None
    )
    monkeypatch.setattr(dequantized, "_load_backend", lambda: SimpleNamespace(weights=weights))


def is_in_fp8(config: DequantizedConfig, name: str) -> bool:
    layer = LinearBase.__new__(LinearBase)
    with set_current_vllm_config(VllmConfig()):
        made = config.get_quant_method(layer, name)
    assert isinstance(made, Fp8Linear | UnquantizedLinearMethod)
    return isinstance(made, Fp8Linear)


def configuration(*ignored: str) -> DequantizedConfig:
    made = DequantizedConfig(FP8 | dict(modules_to_not_convert=list(ignored)))
    made.packed_modules_mapping = MERGED
    return made


def test_layers_that_keep_fp8() -> None:
    made = configuration("model.layers.1.self_attn.k_proj", "model.layers.2")
    assert is_in_fp8(made, "model.layers.0.mlp.down_proj")
    assert is_in_fp8(made, "model.layers.0.self_attn.qkv_proj")
    assert not is_in_fp8(made, "model.layers.1.self_attn.qkv_proj"), "a part of it is ignored"
    assert not is_in_fp8(made, "model.layers.2.mlp.down_proj"), "within what is ignored"
    assert is_in_fp8(made, "model.layers.21.mlp.down_proj")
    assert not is_in_fp8(made, "model.layers.0.self_attn.kv_b_proj"), "absorbed"


def test_names_of_the_files_become_those_of_the_model() -> None:
    made = configuration("model.language_model.layers.0.mlp.gate", "lm_head", "re:.*o_proj$")
    assert is_in_fp8(made, "language_model.model.layers.0.mlp.gate")
    made.apply_vllm_mapper(MAPPER.get_rename_mapper())
    assert not is_in_fp8(made, "language_model.model.layers.0.mlp.gate")
    assert not is_in_fp8(made, "language_model.model.layers.0.self_attn.o_proj")
    assert is_in_fp8(made, "language_model.model.layers.0.mlp.gate_up_proj")


def test_four_bits_stay_where_that_is_asked_for() -> None:
    """In bfloat16, but for experts and what routes to them, whose names AWQ's writers may leave out."""
    made = DequantizedConfig(AWQ | dict(modules_to_not_convert=["model.layers.2"]))
    made.packed_modules_mapping = MERGED

    def stays(name: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> bool:
        vllm_config = VllmConfig(**(options or kernels(NATIVE)))
        with set_current_vllm_config(vllm_config), set_default_torch_dtype(dtype):
            return isinstance(made.get_quant_method(LinearBase.__new__(LinearBase), name), Uint4Linear)

    assert stays("model.layers.0.self_attn.qkv_proj")
    assert stays("model.layers.0.mlp.gate_up_proj")
    for other in ("model.layers.2.mlp.down_proj", "model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate"):
        assert not stays(other)
    assert not stays("model.layers.0.self_attn.kv_b_proj"), "absorbed"
    assert not stays("model.layers.0.mlp.down_proj", torch.float32)
    assert not stays("model.layers.0.mlp.down_proj", load_config=LoadConfig())


class Layer(nn.Module):
    def __init__(self, in_fp8: bool) -> None:
        super().__init__()
        self.quant_method = Fp8Linear(arithmetic=HostArithmetic, largest=448.0, prefix="") if in_fp8 else None


def model(mapper: WeightsMapper | None, **layers: nn.Module) -> Any:
    made: Any = nn.ModuleDict({"language_model": nn.ModuleDict({"model": nn.ModuleDict(layers)})})
    made.packed_modules_mapping = MERGED
    if mapper is not None:
        made.hf_to_vllm_mapper = mapper
    return made


def test_what_the_model_has_without_fp8_is_decoded() -> None:
    layers = dict(qkv_proj=Layer(True), gate_up_proj=Layer(False), fc=nn.Linear(2, 2), output=Layer(False))
    keeps = native_layers(model(MAPPER, **layers), read_format(FP8))
    assert keeps("model.language_model.k_proj")
    assert not keeps("model.language_model.up_proj")
    assert not keeps("model.language_model.fc")
    assert not keeps("model.language_model.output")


def test_layers_that_a_model_renames_itself_go_by_those_of_their_end() -> None:
    """As DeepSeek's layer for MTP, of which a rank's part may not fit."""
    made = model(None, mtp_block=nn.ModuleDict({"self_attn": nn.ModuleDict({"o_proj": Layer(False)})}))
    keeps = native_layers(made, read_format(FP8))
    assert not keeps("model.layers.61.self_attn.o_proj")
    assert keeps("model.layers.61.mlp.o_proj")

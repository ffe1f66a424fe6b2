"""Patches of single models' layers still have their reasons: these fail when upstream moves; then review the patch."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn
from vllm.model_executor.models.falcon_h1 import FalconH1MLP
from vllm.model_executor.models.olmo_hybrid import OlmoHybridModel
from vllm.triton_utils import HAS_TRITON

from vllm_gaudi_spec import compat
from vllm_gaudi_spec.compat import models

HIDDEN, WIDE = 6, 8


def mlp() -> SimpleNamespace:
    torch.manual_seed(0)
    gate_up, down = torch.randn(2 * WIDE, HIDDEN), torch.randn(HIDDEN, WIDE)
    return SimpleNamespace(
        gate_up_proj=lambda x: (x @ gate_up.T, None),
        down_proj=lambda x: (x @ down.T, None),
        act_fn=lambda x: F.silu(x[:, :WIDE]) * x[:, WIDE:],
        intermediate_size=WIDE,
        tp_size=1,
        gate_multiplier=0.3,
        down_multiplier=0.7,
    )


class InPlace(TorchDispatchMode):
    """Names of operations that change a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func._schema.is_mutable:
            self.found.append(str(func))
        return func(*args, **kwargs or {})


def test_norms_of_olmo_hybrid_still_have_two_names() -> None:
    def loaded_as(name: str) -> str | None:
        return OlmoHybridModel.hf_to_vllm_mapper.map_name(f"layers.0.{name}.weight")

    assert "attention_layer_norm" not in inspect.getsource(OlmoHybridModel), "vLLM renames it by itself"
    compat.load_olmo_norms_by_their_published_names()
    compat.load_olmo_norms_by_their_published_names()
    assert loaded_as("attention_layer_norm") == loaded_as("input_layernorm") == "layers.0.input_layernorm.weight"
    found = [loaded_as(name) for name in ("feedforward_layer_norm", "post_attention_layernorm")]
    assert found == ["layers.0.post_attention_layernorm.weight"] * 2
    assert loaded_as("linear_attn.q_proj") == "layers.0.linear_attn.in_proj_qkvg.weight"


def test_layers_of_olmo_hybrid_still_ask_for_triton() -> None:
    compat.build_olmo_layers_without_triton()
    asks = olmo_gdn_linear_attn.set_triton_allocator
    assert "set_triton_allocator(" in inspect.getsource(olmo_gdn_linear_attn.OlmoHybridGatedDeltaNetAttention.__init__)
    asks(torch.device("cpu"))
    if not HAS_TRITON:
        with pytest.raises(AttributeError):
            inspect.unwrap(asks)(torch.device("cpu"))


def test_l06_gates_of_falcon_h1_are_scaled_as_vllm_does_but_not_in_place() -> None:
    original = inspect.unwrap(FalconH1MLP.forward)
    layer, x = mlp(), torch.randn(5, HIDDEN)
    with InPlace() as theirs:
        expected = original(layer, x)
    with InPlace() as ours:
        found = models._scale_gates(original, layer, x)
    assert theirs.found, "vLLM changes no tensor in place any more"
    assert not ours.found
    assert torch.equal(found, expected)

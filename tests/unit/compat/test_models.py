"""Patches of single models' layers still have their reasons: these fail when upstream moves; then review the patch."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.models.falcon_h1 import FalconH1MLP

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

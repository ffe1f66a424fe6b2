"""Single layers of vLLM's models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.compat.patching import wrap

if TYPE_CHECKING:
    import torch


def scale_falcon_gates_in_new_tensors() -> None:
    """Let the MLPs of Falcon-H1 multiply their gates into a new tensor.

    Reason: vLLM's multiplies half of a tensor in place, and HPU graphs do not support in-place writes through views
    (Intel's documentation of HPU Graphs, limitations).
    Remove when: `FalconH1MLP.forward` updates no view.
    """
    from vllm.model_executor.models.falcon_h1 import FalconH1MLP

    wrap(FalconH1MLP, "forward", _scale_gates)


def _scale_gates(original: Callable[..., torch.Tensor], mlp: Any, x: torch.Tensor) -> torch.Tensor:
    import torch

    gate, up = mlp.gate_up_proj(x)[0].chunk(2, dim=-1)
    scaled = torch.cat((gate * mlp.gate_multiplier, up), dim=-1)
    output: torch.Tensor = mlp.down_proj(mlp.act_fn(scaled))[0] * mlp.down_multiplier
    return output

"""The NPU's fused norms, rotary embeddings and gated activation, and experts, in place of vLLM's layers. Importing this
registers them."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding

from vllm_gaudi_spec.devices.common import dense_experts, ir_norms, rotary_classes  # noqa: F401

logger = init_logger(__name__)

PROVIDER = "vgs_ascend"


def _load(name: str) -> Any:
    """An operation of torch_npu; None, said once, where this build has none."""
    operation = getattr(importlib.import_module("torch_npu"), name, None)
    if operation is None:
        logger.info("This torch_npu has no %s; plain torch operations serve.", name)
    return operation


_rms_norm = _load("npu_rms_norm")
_add_rms_norm = _load("npu_add_rms_norm")
_rotate = _load("npu_rotary_mul")
_swiglu = _load("npu_swiglu")


def _norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    normed: torch.Tensor = _rms_norm(x, weight, epsilon)[0]
    return normed


def _add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    normed, _, added = _add_rms_norm(x, residual, weight, epsilon)
    return normed, added


ir_norms.register(PROVIDER, _norm, _add_norm, available=None not in (_rms_norm, _add_rms_norm))


def _turn(heads_THR: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, *, halves: bool) -> torch.Tensor:
    """As [1, T, H, R], with the tables of one row."""
    mode = "half" if halves else "interleave"
    turned: torch.Tensor = _rotate(heads_THR[None].contiguous(), cos_T1R[None], sin_T1R[None], mode)
    return turned[0]


if _rotate is not None:
    for _base in (RotaryEmbedding, DeepseekScalingRotaryEmbedding):
        rotary_classes.register("Npu", rotary_classes.turning(_turn), _base)


if _swiglu is not None:

    @SiluAndMul.register_oot
    class NpuSiluAndMul(SiluAndMul):
        def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
            gated: torch.Tensor = _swiglu(x, -1)
            return gated

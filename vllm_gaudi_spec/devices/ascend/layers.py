"""Replaces vLLM's layers with the NPU's fused norms, rotary embeddings, gated activation, and experts.

Importing this module registers the replacements.
"""

from __future__ import annotations

import torch

from vllm_gaudi_spec.devices.ascend import experts as ascend_experts
from vllm_gaudi_spec.devices.common import experts, layers
from vllm_gaudi_spec.upstream.layers import SiluAndMul

PROVIDER = "vgs_ascend"


_rms_norm = layers.find_kernel("torch_npu", "npu_rms_norm")
_add_rms_norm = layers.find_kernel("torch_npu", "npu_add_rms_norm")
_rotate = layers.find_kernel("torch_npu", "npu_rotary_mul")
_swiglu = layers.find_kernel("torch_npu", "npu_swiglu")


def _norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    normed: torch.Tensor = _rms_norm(x, weight, epsilon)[0]
    return normed


def _add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    normed, _, added = _add_rms_norm(x, residual, weight, epsilon)
    return normed, added


layers.register_norms(PROVIDER, _norm, _add_norm, available=None not in (_rms_norm, _add_rms_norm))


def _turn(heads_THR: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, *, halves: bool) -> torch.Tensor:
    """Rotate heads in the layout [1, T, H, R]."""
    mode = "half" if halves else "interleave"
    turned: torch.Tensor = _rotate(heads_THR[None].contiguous(), cos_T1R[None], sin_T1R[None], mode)
    return turned[0]


if _rotate is not None:
    layers.register_rotary("Npu", _turn)


if _swiglu is not None:

    @SiluAndMul.register_oot
    class NpuSiluAndMul(SiluAndMul):
        def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
            gated: torch.Tensor = _swiglu(x, -1)
            return gated


experts.register(ascend_experts.fused())

"""vLLM's C++ RMS norms for the CPU, offered to its IR under the name `vgs_cpu`.

The build has them, but upstream leaves norms to its compiler and so never calls them in eager steps. One call costs
4 us in place of 34 for seven small tensor operations, and a step of a 30-layer model makes 61.
"""

from __future__ import annotations

import torch

from vllm_gaudi_spec.devices.common import layers

PROVIDER = "vgs_cpu"


def available() -> bool:
    return hasattr(torch.ops._C, "rms_norm") and hasattr(torch.ops._C, "fused_add_rms_norm")


def _norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def _add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.ops._C.fused_add_rms_norm(x, residual, weight, epsilon)
    return x, residual


layers.register_norms(
    PROVIDER, _norm, _add_norm, available=available(), takes=lambda x: x.is_contiguous(), in_place=True
)

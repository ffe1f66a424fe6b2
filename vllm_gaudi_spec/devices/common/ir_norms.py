"""RMS norms of a device, offered to vLLM's IR: the one place that knows how the IR wants to be answered."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm import ir

Norm = Callable[[torch.Tensor, torch.Tensor | None, float], torch.Tensor]
AddNorm = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, float],
    tuple[torch.Tensor, torch.Tensor],
]


def register(
    provider: str,
    norm: Norm,
    add_norm: AddNorm,
    *,
    available: bool,
    takes: Callable[[torch.Tensor], bool] = lambda x: True,
    in_place: bool = False,
) -> None:
    """`takes`: which inputs the kernels take, besides those of the weight's dtype. `in_place`: `add_norm` writes its
    results over its inputs."""

    def supports(
        x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> bool:
        return variance_size is None and weight is not None and weight.dtype == x.dtype and takes(x)

    def supports_add(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> bool:
        return supports(x, weight, epsilon, variance_size) and takes(x_residual)

    @ir.ops.rms_norm.register_impl(provider, supports_args=supports, supported=available)
    def rms_norm(
        x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> torch.Tensor:
        return norm(x, weight, epsilon)

    @ir.ops.fused_add_rms_norm.register_impl(
        provider, supports_args=supports_add, supported=available, inplace=in_place
    )
    def fused_add_rms_norm(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_norm(x, x_residual, weight, epsilon)

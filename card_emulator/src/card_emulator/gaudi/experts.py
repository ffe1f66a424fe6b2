"""`hpu::mixture_of_experts` in plain torch.

The signatures come from the bridge (v1.19, kernels_register.cpp) and vllm-gaudi's calls (v0.26.0,
extension/ops.py). The results pass vllm-gaudi's tests, which use layers from real checkpoints. Variants without
published results are omitted: those with biases or MXFP4 weights (gpt-oss), and those that take measurements for FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from card_emulator import kernels
from card_emulator.card import DEVICE, DeviceRefusal
from card_emulator.gaudi.fused import define

# The arguments `chunk_size` and `total_experts` exist only in releases after 1.19. They do not affect the result.
_SCHEMAS = """
mixture_of_experts(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, Tensor[] w1, Tensor[] w2,
 Tensor[] w3, bool permuted_weights, str activation, int experts_min, int experts_max) -> Tensor
mixture_of_experts.fused_weights(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights,
 Tensor[] w12, Tensor[] w3, bool permuted_weights, str activation, int experts_min, int experts_max,
 int chunk_size=0, int total_experts=0) -> Tensor
mixture_of_experts.fp8_fused_weights(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights,
 Tensor[] w12, Tensor[] w3, Tensor d_scale_hidden_states, Tensor[] d_scale_w12, Tensor[] d_scale_w3,
 bool permuted_weights, str activation, int experts_min, int experts_max,
 Tensor[]? d_scale_intermediate_hidden_states=None, int chunk_size=0, int total_experts=0) -> Tensor
"""
# The card computes GELU with the tanh approximation (vllm-gaudi v0.26.0, ops/hpu_fused_moe.py).
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}

Weights = Sequence[torch.Tensor]


def _mixed(
    x: torch.Tensor, table: torch.Tensor, router: torch.Tensor, experts_min: int, experts_max: int,
    expert: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Return the sum of the experts' results, weighted by the router. Every token is sent through every expert, so that
    no shape depends on values."""
    out = torch.zeros(x.shape, device=x.device)
    for index in range(experts_max - experts_min + 1):
        share = (router.float() * (table == index + experts_min)).sum(-1, keepdim=True)
        out = out + expert(x, index).float() * share
    return out


def _turned(weight: torch.Tensor, permuted: bool) -> torch.Tensor:
    """Return the weight as [in, out]. If `permuted` is set, the weight is stored as [out, in], as in a linear layer."""
    return weight.t() if permuted else weight


def _check(x: torch.Tensor, table: torch.Tensor, router: torch.Tensor) -> None:
    """Reject dtypes for which the operation does not compile (vllm-gaudi v0.26.0, ops/hpu_fused_moe.py)."""
    if DEVICE.installed and DEVICE.hostile and (table.dtype != torch.int64 or router.dtype != x.dtype):
        raise DeviceRefusal(
            f"hpu::mixture_of_experts of {x.dtype} with ids in {table.dtype} and router weights in {router.dtype}; "
            "it requires int64 ids, and router weights in the dtype of the hidden states"
        )


def mixture_of_experts(
    x: torch.Tensor, table: torch.Tensor, router: torch.Tensor, w1: Weights, w2: Weights, w3: Weights, permuted: bool,
    activation: str, experts_min: int, experts_max: int,
) -> torch.Tensor:  # fmt: skip
    _check(x, table, router)
    act = _ACTIVATIONS[activation]

    def expert(x: torch.Tensor, index: int) -> torch.Tensor:
        gate, up, down = (_turned(weights[index], permuted) for weights in (w1, w2, w3))
        return (act(x @ gate) * (x @ up)) @ down

    return _mixed(x, table, router, experts_min, experts_max, expert).to(x.dtype)


def fused_weights(
    x: torch.Tensor, table: torch.Tensor, router: torch.Tensor, w12: Weights, w3: Weights, permuted: bool,
    activation: str, experts_min: int, experts_max: int, chunk_size: int = 0, total_experts: int = 0,
) -> torch.Tensor:  # fmt: skip
    _check(x, table, router)
    act = _ACTIVATIONS[activation]

    def expert(x: torch.Tensor, index: int) -> torch.Tensor:
        gate, up = (x @ _turned(w12[index], permuted)).chunk(2, -1)
        return (act(gate) * up) @ _turned(w3[index], permuted)

    return _mixed(x, table, router, experts_min, experts_max, expert).to(x.dtype)


def fp8_fused_weights(
    x: torch.Tensor, table: torch.Tensor, router: torch.Tensor, w12: Weights, w3: Weights, x_scale: torch.Tensor,
    w12_scale: Weights, w3_scale: Weights, permuted: bool, activation: str, experts_min: int, experts_max: int,
    inner_scale: Weights | None = None, chunk_size: int = 0, total_experts: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Return the result in the router's dtype. Values between the matmuls are rounded to FP8 only if `inner_scale` is
    set."""
    act = _ACTIVATIONS[activation]

    def expert(x: torch.Tensor, index: int) -> torch.Tensor:
        wide = (
            (x.float() @ _turned(w12[index].float(), permuted)) * x_scale.float() * w12_scale[index].float().flatten()
        )
        gate, up = wide.to(router.dtype).chunk(2, -1)
        inner = act(gate) * up
        scale = w3_scale[index].float().flatten()
        if inner_scale is not None:
            inner = kernels.to_e4m3(inner.float() / inner_scale[index].float(), DEVICE.e4m3_max)
            scale = scale * inner_scale[index].float()
        return (inner.float() @ _turned(w3[index].float(), permuted)) * scale

    return _mixed(x, table, router, experts_min, experts_max, expert).to(router.dtype)


def register() -> None:
    define(
        _SCHEMAS,
        {
            "mixture_of_experts": mixture_of_experts,
            "mixture_of_experts.fused_weights": fused_weights,
            "mixture_of_experts.fp8_fused_weights": fp8_fused_weights,
        },
    )

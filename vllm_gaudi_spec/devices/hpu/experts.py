"""Gaudi's operator for experts."""

from __future__ import annotations

import torch

from vllm_gaudi_spec.devices.common.experts import Call, Fused
from vllm_gaudi_spec.devices.common.layers import find_kernel
from vllm_gaudi_spec.upstream.layers import MoEActivation

# Number of tokens from which on the operator is used. Below, reading weights takes longer than computing with all of
# them: a Gaudi 2 does 432 TFLOPS in bfloat16, and reads 2.45 TB/s. At batch 1 the operator was no faster
# (vllm-gaudi#1733).
GAUDI_OPERATOR_FROM = 128
# Its gelu is the tanh form (vllm-gaudi v0.26.0, ops/hpu_fused_moe.py).
_ACTIVATIONS = {MoEActivation.SILU: "silu", MoEActivation.GELU_TANH: "gelu"}


def fused() -> Fused | None:
    mixture = find_kernel("torch.ops.hpu", "mixture_of_experts")

    def run(call: Call) -> torch.Tensor:
        """Called as vllm-gaudi does (v0.26.0, extension/ops.py), but for ids: the operator looks its weights up by
        them, so they count from this rank's first expert (vllm-gaudi, pull request 1796). The last one is included."""
        ids_TK, weights_TK = call.chosen()
        result: torch.Tensor = mixture(
            hidden_states=call.x_TH,
            expert_routing_table=ids_TK,
            router_weights=weights_TK,
            w12=list(call.w13_EJH.unbind()),
            w3=list(call.w2_EHI.unbind()),
            permuted_weights=True,
            activation=_ACTIVATIONS[call.activation],
            experts_min=0,
            experts_max=len(call.w13_EJH) - 1,
        )
        return result

    return None if mixture is None else Fused(run, _takes, GAUDI_OPERATOR_FROM)


def _takes(call: Call) -> bool:
    """Not the form with biases, for gpt-oss: on a Gaudi 3 with release 1.24 users got incoherent texts from it."""
    return call.activation in _ACTIVATIONS and call.b13_EJ is None and not call.weighs_inputs

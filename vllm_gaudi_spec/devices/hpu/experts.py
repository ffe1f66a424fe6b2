"""Gaudi's fused operator for mixture-of-experts layers."""

from __future__ import annotations

import torch

from vllm_gaudi_spec.devices.common.experts import Call, Fused
from vllm_gaudi_spec.devices.common.layers import find_kernel
from vllm_gaudi_spec.upstream.layers import MoEActivation

# The minimum number of tokens for the operator. With fewer, a step spends most of its time reading weights, so
# computing all experts costs nothing: a Gaudi 2 has 432 TFLOPS in bfloat16 and reads 2.45 TB/s. At batch size 1, the
# operator was not faster (vllm-gaudi#1733).
GAUDI_OPERATOR_FROM = 128
# The operator's gelu uses the tanh approximation (vllm-gaudi v0.26.0, ops/hpu_fused_moe.py).
_ACTIVATIONS = {MoEActivation.SILU: "silu", MoEActivation.GELU_TANH: "gelu"}


def fused() -> Fused | None:
    mixture = find_kernel("torch.ops.hpu", "mixture_of_experts")

    def run(call: Call) -> torch.Tensor:
        """Call the operator in the same way as vllm-gaudi (v0.26.0, extension/ops.py), except for the expert IDs.

        The operator looks up weights by ID, so IDs are counted from this rank's first expert (vllm-gaudi#1796).
        `experts_max` is inclusive.
        """
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
    """Whether the operator supports a call.

    Biases, as in gpt-oss, are not supported, because users of Gaudi 3 got garbled text from such calls on release 1.24.
    """
    return call.activation in _ACTIVATIONS and call.b13_EJ is None and not call.weighs_inputs

"""Experts without quantisation, for which vLLM leaves out-of-tree platforms without a kernel. Importing this registers
them.

T tokens, E experts of this rank, I inner size. Every expert sees every token, and those not chosen count nothing: which
experts a token chooses decides no shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from vllm_gaudi_spec.config import UnsupportedConfigError

Activation = Callable[[torch.Tensor], torch.Tensor]


def _gated_by(function: Activation) -> Activation:
    """Of inputs whose first half opens or closes the second."""

    def activate(inputs: torch.Tensor) -> torch.Tensor:
        gate, up = inputs.chunk(2, dim=-1)
        return function(gate) * up

    return activate


def _clamped_swiglu(inputs: torch.Tensor) -> torch.Tensor:
    """Of gpt-oss, whose gates alternate with what they open or close."""
    gate, up = inputs.unflatten(-1, (-1, 2)).unbind(-1)
    gate = gate.clamp(max=_LIMIT)
    return gate * torch.sigmoid(gate * _ALPHA) * (up.clamp(min=-_LIMIT, max=_LIMIT) + 1)


# As vLLM's kernels have them; a model with others is refused.
_ALPHA, _LIMIT = 1.702, 7.0
_ACTIVATIONS = {
    MoEActivation.SILU: _gated_by(torch.nn.functional.silu),
    MoEActivation.GELU: _gated_by(torch.nn.functional.gelu),
    MoEActivation.GELU_TANH: _gated_by(partial(torch.nn.functional.gelu, approximate="tanh")),
    MoEActivation.SWIGLUOAI: _clamped_swiglu,
}


@MoERunner.register_oot
class VisibleRunner(MoERunner):
    """Without the operation in which vLLM hides its experts from compilers: here they are a part of the step."""

    def _select_forward(self) -> Callable[..., Any]:
        return self._run

    def _run(
        self,
        hidden: torch.Tensor,
        router_logits: torch.Tensor,
        shared_input: torch.Tensor | None,
        input_ids: torch.Tensor | None,
        *of_the_operation: Any,
    ) -> Any:
        return self._forward_impl(hidden, router_logits, shared_input, input_ids)

    def _maybe_apply_routed_scale_to_output(
        self, shared_output: torch.Tensor | None, fused_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """As vLLM's, but not in place: several ranks' outputs are views, through which a captured graph on a Gaudi must
        not write (lesson L06)."""
        factor = self.routed_scaling_factor
        if factor == 1.0:
            return shared_output, fused_output
        if shared_output is not None and fused_output.dtype == torch.float16:
            return shared_output * (1.0 / factor), fused_output
        return shared_output, fused_output * factor


@UnquantizedFusedMoEMethod.register_oot
class DenseExperts(UnquantizedFusedMoEMethod):
    # It routes too: vLLM's routers are kernels of other devices.
    is_monolithic = True

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        for is_unsupported, what in (
            # An expert that is not chosen would not come out zero.
            (self.moe.has_bias and layer.apply_router_weight_on_input, "biases and weighted inputs"),
            (layer.activation not in _ACTIVATIONS, f"activation {layer.activation.value}"),
        ):
            if is_unsupported:
                raise UnsupportedConfigError(f"{layer.layer_name}: experts with {what} are not supported.")
        self.local_experts = _local_experts(layer.expert_map)
        super().create_weights(layer, *args, **kwargs)

    def apply_monolithic(
        self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        num_experts = self.moe.num_experts
        if router_logits.shape[-1] != num_experts:  # hidden states, where vLLM routes elsewhere: no error would follow
            raise ValueError(f"{num_experts} experts are routed by {router_logits.shape[-1]} logits")
        weights_TE = _weights(layer, x, router_logits)
        if self.local_experts is not None:
            weights_TE = weights_TE.narrow(1, *self.local_experts)
        weights_TE = (weights_TE * layer.routed_scaling_factor).to(x.dtype)
        activate = _ACTIVATIONS[layer.activation]
        products_ETI = torch.matmul(x, layer.w13_weight.transpose(1, 2))
        weights_ET1 = weights_TE.T.unsqueeze(-1)
        if self.moe.has_bias:
            products_ETI = products_ETI + layer.w13_bias.unsqueeze(1)
        if layer.apply_router_weight_on_input:
            # As if the inputs were: the products are linear, and an input of zero comes out zero.
            inner_ETI = activate(products_ETI * weights_ET1)
        else:
            inner_ETI = activate(products_ETI) * weights_ET1
        result = torch.matmul(inner_ETI, layer.w2_weight.transpose(1, 2)).sum(0)
        return result + weights_TE @ layer.w2_bias if self.moe.has_bias else result


def _weights(layer: Any, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
    """float32 [T, E], by the model's own function where it has one."""
    if layer.custom_routing_function is None:
        return route(
            router_logits,
            top_k=layer.top_k,
            scoring=layer.scoring_func,
            renormalize=layer.renormalize,
            bias_E=layer.e_score_correction_bias,
            num_groups=layer.num_expert_group if layer.use_grouped_topk else 1,
            top_groups=layer.topk_group if layer.use_grouped_topk else 1,
        )
    chosen_TK, ids_TK = layer.custom_routing_function(
        hidden_states=x, gating_output=router_logits, topk=layer.top_k, renormalize=layer.renormalize
    )
    weights_TE = torch.zeros(router_logits.shape, dtype=torch.float32, device=router_logits.device)
    return weights_TE.scatter(-1, ids_TK.long(), chosen_TK.float())


def _local_experts(expert_map: torch.Tensor | None) -> tuple[int, int] | None:
    """With expert parallelism: the first of this rank's experts, and how many follow each other from there."""
    if expert_map is None:
        return None
    ids = (expert_map >= 0).nonzero().flatten().tolist()
    if ids != list(range(ids[0], ids[0] + len(ids))):
        raise UnsupportedConfigError("experts are placed one after the other; use --expert-placement-strategy linear.")
    return ids[0], len(ids)


def route(
    logits_TE: torch.Tensor,
    *,
    top_k: int,
    scoring: str,
    renormalize: bool,
    bias_E: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
) -> torch.Tensor:
    """float32 [T, E]: the weight of each expert, 0 for those not chosen. A bias counts in the choice only.

    Of several groups of experts the best are chosen first: by their best expert, or with a bias by their best two.
    """
    logits_TE = logits_TE.float()
    scores_TE = logits_TE.sigmoid() if scoring == "sigmoid" else logits_TE.softmax(-1)
    biased_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if top_groups < num_groups:
        groups_TGE = biased_TE.unflatten(-1, (num_groups, -1))
        group_scores_TG = groups_TGE.topk(1 if bias_E is None else 2, dim=-1).values.sum(-1)
        open_TG = _chosen(group_scores_TG, top_groups)
        biased_TE = torch.where(open_TG.unsqueeze(-1), groups_TGE, float("-inf")).flatten(1)
    weights_TE = torch.where(_chosen(biased_TE, top_k), scores_TE, 0.0)
    return weights_TE / weights_TE.sum(-1, keepdim=True) if renormalize else weights_TE


def _chosen(scores: torch.Tensor, count: int) -> torch.Tensor:
    best = scores.topk(count, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)

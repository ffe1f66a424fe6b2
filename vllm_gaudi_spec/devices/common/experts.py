"""Experts without quantization, for which vLLM leaves out-of-tree platforms without a kernel.

T tokens, H hidden size, K experts of a token; E experts of this rank, S some of them, I inner size. Which experts a
token chooses decides no shape, and is not read by the host. So that is how they are computed by T, K and E alone:

- by the device's own operator, where it has one that takes the layer;
- `gathered`: where few weights are needed, these are copied together, and every token sees the experts of all;
- `dense`: every token sees every expert. Those not chosen count nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.upstream.layers import MoEActivation, MoERunner, UnquantizedFusedMoEMethod

# What a gathered weight costs beside one that is used where it lies: it is read, written, and read again.
COST_OF_GATHERING = 3
GATHERED_BYTES_AT_ONCE = 256 << 20

# --- activations ---

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


# --- forms ---


def num_gathered(num_tokens: int, top_k: int, num_experts: int) -> int:
    """Return how many experts' weights are copied together; 0 to compute with all of them in place."""
    reached = num_tokens * top_k
    return reached if reached * COST_OF_GATHERING < num_experts else 0


class Call(NamedTuple):
    """What experts compute: of the weights, J is 2 I. Biases are None where a model has none."""

    x_TH: torch.Tensor
    weights_TE: torch.Tensor
    """What the router gives an expert, 0 for those not chosen."""
    w13_EJH: torch.Tensor
    b13_EJ: torch.Tensor | None
    w2_EHI: torch.Tensor
    b2_EH: torch.Tensor | None
    activation: MoEActivation
    weighs_inputs: bool
    """Whether weights count before the activation."""
    top_k: int

    def of_experts(self, part: Callable[[torch.Tensor, int], torch.Tensor]) -> Call:
        """`part` takes some of the experts, which lie along a dimension of a tensor."""
        return self._replace(
            weights_TE=part(self.weights_TE, 1),
            w13_EJH=part(self.w13_EJH, 0),
            b13_EJ=None if self.b13_EJ is None else part(self.b13_EJ, 0),
            w2_EHI=part(self.w2_EHI, 0),
            b2_EH=None if self.b2_EH is None else part(self.b2_EH, 0),
        )

    def inner(self, products: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """What the second product is made of, from the first."""
        activate = _ACTIVATIONS[self.activation]
        if bias is not None:
            products = products + bias
        # As if the inputs were weighed: the products are linear, and an input of zero comes out zero.
        inner = activate(products * weights) if self.weighs_inputs else activate(products) * weights
        # Where float16 ends, an expert that nobody chose would count: infinity times 0 is NaN.
        return inner.masked_fill(weights == 0, 0.0) if inner.dtype == torch.float16 else inner

    def chosen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 and weights [T, K]: K experts of this rank for each token, all that it chose among them. The others, of
        weight 0, stand for experts of other ranks: so no index is outside, and none is there twice."""
        ids_TK = self.weights_TE.abs().topk(min(self.top_k, self.weights_TE.shape[1]), dim=-1).indices
        return ids_TK, self.weights_TE.gather(1, ids_TK)


Form = Callable[[Call], torch.Tensor]

# Tokens times experts whose products are there at once. vllm-gaudi's go up to twice as many, 512 times 32: larger ones
# do not compile on a Gaudi (v0.26.0, ops/hpu_fused_moe.py).
_ROWS_AT_ONCE = 8192


def dense(call: Call) -> torch.Tensor:
    """Some experts after the others, so that memory does not grow with all of them times all tokens."""
    num_tokens, num_experts = call.weights_TE.shape
    if num_tokens > _ROWS_AT_ONCE:
        some_tokens = zip(call.x_TH.split(_ROWS_AT_ONCE), call.weights_TE.split(_ROWS_AT_ONCE), strict=True)
        return torch.cat([dense(call._replace(x_TH=x, weights_TE=weights)) for x, weights in some_tokens])
    size = min(max(_ROWS_AT_ONCE // max(num_tokens, 1), 1), num_experts)
    total = None
    for first in range(0, num_experts, size):
        some = call.of_experts(partial(_narrow, first, min(size, num_experts - first)))
        products_STJ = torch.matmul(some.x_TH, some.w13_EJH.transpose(1, 2))
        bias_S1J = None if some.b13_EJ is None else some.b13_EJ.unsqueeze(1)
        inner_STI = some.inner(products_STJ, some.weights_TE.T.unsqueeze(-1), bias_S1J)
        result = torch.matmul(inner_STI, some.w2_EHI.transpose(1, 2)).sum(0)
        if some.b2_EH is not None:
            result = result + some.weights_TE @ some.b2_EH
        total = result if total is None else total + result
    assert total is not None
    return total


def _narrow(first: int, count: int, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.narrow(dim, first, count)


def gathered(call: Call) -> torch.Tensor:
    num_tokens, num_experts = call.weights_TE.shape
    count = min(num_tokens * call.top_k, num_experts)
    # NaN, which is not itself, in one row must not choose for the others.
    is_chosen_TE = (call.weights_TE != 0) & (call.weights_TE == call.weights_TE)
    ids_S = is_chosen_TE.float().amax(0).topk(count).indices
    size = max(GATHERED_BYTES_AT_ONCE // (call.w13_EJH[0].nbytes + call.w2_EHI[0].nbytes), 1)
    parts = [dense(call.of_experts(partial(_select, some_S))) for some_S in ids_S.split(size)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _select(ids_S: torch.Tensor, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.index_select(dim, ids_S)


GroupedProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of rows [N, in] and matrices [E, in, out]: the first rows with the first matrix, and so on, by int64 counts [E]."""


def grouped(product: GroupedProduct, call: Call) -> torch.Tensor:
    """Each token with the experts that it chose alone: its copies are sorted by their experts."""
    (num_tokens, num_experts), hidden = call.weights_TE.shape, call.x_TH.shape[1]
    ids_TK, weights_TK = call.chosen()
    # As floats: an NPU sorts integers on its AI CPU (lesson Q07).
    ids_N, order_N = ids_TK.flatten().float().sort()
    counts_E = (ids_N == torch.arange(num_experts, dtype=ids_N.dtype, device=ids_N.device).unsqueeze(-1)).sum(1)
    tokens_TK = torch.arange(num_tokens, device=ids_N.device).unsqueeze(-1).expand_as(ids_TK)
    rows_NH = call.x_TH.index_select(0, tokens_TK.flatten().index_select(0, order_N))
    weights_N1 = weights_TK.flatten().index_select(0, order_N).unsqueeze(-1)
    b13_NJ, b2_NH = (None if b is None else b.index_select(0, ids_N.long()) for b in (call.b13_EJ, call.b2_EH))
    products_NJ = product(rows_NH, call.w13_EJH.transpose(1, 2), counts_E)
    results_NH = product(call.inner(products_NJ, weights_N1, b13_NJ), call.w2_EHI.transpose(1, 2), counts_E)
    if b2_NH is not None:
        results_NH = results_NH + weights_N1 * b2_NH
    # Back in their order, and not added where they belong: the order of such additions differs from run to run.
    return results_NH.index_select(0, order_N.float().argsort()).view(num_tokens, -1, hidden).sum(1)


class Fused(NamedTuple):
    """An operator of a device's own."""

    run: Form
    takes: Callable[[Call], bool]
    min_tokens: int
    """From here on it is used."""


def form_of(call: Call, fused: Fused | None) -> Form:
    """docs/performance.md has what was measured, and of which devices."""
    num_tokens, num_experts = call.weights_TE.shape
    # Where a rank has as few experts as a token chooses, the operator computes no less.
    if fused and num_tokens >= fused.min_tokens and call.top_k < num_experts and fused.takes(call):
        return fused.run
    return gathered if num_gathered(num_tokens, call.top_k, num_experts) else dense


# --- vLLM's layers ---


def register(fused: Fused | None = None) -> None:
    """In place of vLLM's, once in a process."""
    MoERunner.register_oot(VisibleRunner)
    UnquantizedFusedMoEMethod.register_oot(type("DeviceExperts", (Experts,), {"fused": fused}))


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


class Experts(UnquantizedFusedMoEMethod):
    # It routes too: vLLM's routers are kernels of other devices.
    is_monolithic = True
    fused: Fused | None = None

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        for is_unsupported, what in (
            # An expert that is not chosen would not come out zero.
            (self.moe.has_bias and layer.apply_router_weight_on_input, "biases and weighted inputs"),
            (layer.activation not in _ACTIVATIONS, f"activation {layer.activation.value}"),
            (
                self.moe.swiglu_limit is not None and layer.activation != MoEActivation.SWIGLUOAI,
                f"activation {layer.activation.value} and a limit",
            ),
            (
                layer.custom_routing_function is None and layer.scoring_func not in _SCORINGS,
                f"scores by {layer.scoring_func}",
            ),
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
        call = Call(
            x_TH=x,
            weights_TE=(weights_TE * layer.routed_scaling_factor).to(x.dtype),
            w13_EJH=layer.w13_weight,
            b13_EJ=layer.w13_bias if self.moe.has_bias else None,
            w2_EHI=layer.w2_weight,
            b2_EH=layer.w2_bias if self.moe.has_bias else None,
            activation=layer.activation,
            weighs_inputs=layer.apply_router_weight_on_input,
            top_k=layer.top_k,
        )
        return form_of(call, self.fused)(call)


# --- routing ---


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


_SCORINGS: dict[str, Activation] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
}
# For scores that are all 0.
_TINY = 1e-20


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
    scores_TE = _SCORINGS[scoring](logits_TE)
    biased_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if top_groups < num_groups:
        groups_TGE = biased_TE.unflatten(-1, (num_groups, -1))
        group_scores_TG = groups_TGE.topk(1 if bias_E is None else 2, dim=-1).values.sum(-1)
        open_TG = _chosen(group_scores_TG, top_groups)
        biased_TE = torch.where(open_TG.unsqueeze(-1), groups_TGE, float("-inf")).flatten(1)
    weights_TE = torch.where(_chosen(biased_TE, top_k), scores_TE, 0.0)
    return weights_TE / weights_TE.sum(-1, keepdim=True).clamp(min=_TINY) if renormalize else weights_TE


def _chosen(scores: torch.Tensor, count: int) -> torch.Tensor:
    best = scores.topk(count, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)

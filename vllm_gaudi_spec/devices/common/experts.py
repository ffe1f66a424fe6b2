"""Unquantized mixture-of-experts layers for out-of-tree platforms, for which vLLM provides no kernel.

T: tokens. H: hidden size. K: experts per token. E: experts on this rank. S: a subset of them. I: intermediate size.

Shapes must not depend on which experts the tokens choose, because the host does not read these choices. The
implementation is therefore selected by T, K, and E:

- the device's own operator, if it supports the layer;
- `gathered`: if only a few experts are needed, gather their weights and send every token through all of them;
- `dense`: send every token through every expert, with weight 0 for experts that the token did not choose.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.upstream.layers import MoEActivation, MoERunner, UnquantizedFusedMoEMethod

# The cost of using a gathered copy of a weight relative to using the weight in place: it is read, written, and read
# again.
COST_OF_GATHERING = 3
GATHERED_BYTES_AT_ONCE = 256 << 20

# --- activations ---

Activation = Callable[[torch.Tensor], torch.Tensor]


def _make_gated(function: Activation) -> Activation:
    """Return an activation that applies `function` to the first half of its inputs and multiplies by the second
    half."""

    def activate(inputs: torch.Tensor) -> torch.Tensor:
        gate, up = inputs.chunk(2, dim=-1)
        return function(gate) * up

    return activate


def _clamped_swiglu(inputs: torch.Tensor) -> torch.Tensor:
    """Apply the gpt-oss activation. In its input, gates alternate with the values to be multiplied by them."""
    gate, up = inputs.unflatten(-1, (-1, 2)).unbind(-1)
    gate = gate.clamp(max=_LIMIT)
    return gate * torch.sigmoid(gate * _ALPHA) * (up.clamp(min=-_LIMIT, max=_LIMIT) + 1)


# The constants in vLLM's kernels for this activation. Models with other constants are rejected.
_ALPHA, _LIMIT = 1.702, 7.0
_ACTIVATIONS = {
    MoEActivation.SILU: _make_gated(torch.nn.functional.silu),
    MoEActivation.GELU: _make_gated(torch.nn.functional.gelu),
    MoEActivation.GELU_TANH: _make_gated(partial(torch.nn.functional.gelu, approximate="tanh")),
    MoEActivation.SWIGLUOAI: _clamped_swiglu,
}


# --- forms ---


class Call(NamedTuple):
    """The arguments of an expert layer. J is 2 * I. Biases are None if the model does not have them."""

    x_TH: torch.Tensor
    weights_TE: torch.Tensor
    """The router weights, with 0 for experts that were not chosen."""
    w13_EJH: torch.Tensor
    b13_EJ: torch.Tensor | None
    w2_EHI: torch.Tensor
    b2_EH: torch.Tensor | None
    activation: MoEActivation
    weighs_inputs: bool
    """Whether router weights are applied before the activation."""
    top_k: int

    def select_experts(self, part: Callable[[torch.Tensor, int], torch.Tensor]) -> Call:
        """Return the call with only some of the experts, which `part(tensor, dim)` selects along a tensor's
        dimension."""
        return self._replace(
            weights_TE=part(self.weights_TE, 1),
            w13_EJH=part(self.w13_EJH, 0),
            b13_EJ=None if self.b13_EJ is None else part(self.b13_EJ, 0),
            w2_EHI=part(self.w2_EHI, 0),
            b2_EH=None if self.b2_EH is None else part(self.b2_EH, 0),
        )

    def compute_inner(self, products: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute the inputs of the second matmul from the results of the first."""
        activate = _ACTIVATIONS[self.activation]
        if bias is not None:
            products = products + bias
        # This is equivalent to scaling the inputs, because matmuls are linear and the activations map zero to zero.
        inner = activate(products * weights) if self.weighs_inputs else activate(products) * weights
        # Mask experts that were not chosen. If one of them overflowed in float16, its result would be infinity times 0.
        return inner.masked_fill(weights == 0, 0.0) if inner.dtype == torch.float16 else inner

    def chosen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the IDs, int64 [T, K], and weights [T, K] of this rank's experts for each token.

        If a token chose fewer than K experts on this rank, its remaining IDs are those of other experts on this rank,
        with weight 0, so that no ID is out of range or repeated.
        """
        ids_TK = self.weights_TE.abs().topk(min(self.top_k, self.weights_TE.shape[1]), dim=-1).indices
        return ids_TK, self.weights_TE.gather(1, ids_TK)


Form = Callable[[Call], torch.Tensor]

# The maximum number of token-expert pairs in one matmul. vllm-gaudi uses up to twice as many, 512 tokens for 32
# experts, because larger matmuls do not compile on Gaudi (v0.26.0, ops/hpu_fused_moe.py).
_ROWS_AT_ONCE = 8192


def dense(call: Call) -> torch.Tensor:
    """Send every token through every expert. Only a few experts are computed at a time, so that memory use does not
    grow with the number of token-expert pairs."""
    num_tokens, num_experts = call.weights_TE.shape
    if num_tokens > _ROWS_AT_ONCE:
        some_tokens = zip(call.x_TH.split(_ROWS_AT_ONCE), call.weights_TE.split(_ROWS_AT_ONCE), strict=True)
        return torch.cat([dense(call._replace(x_TH=x, weights_TE=weights)) for x, weights in some_tokens])
    size = min(max(_ROWS_AT_ONCE // max(num_tokens, 1), 1), num_experts)
    total = None
    for first in range(0, num_experts, size):
        some = call.select_experts(partial(_narrow, first, min(size, num_experts - first)))
        products_STJ = torch.matmul(some.x_TH, some.w13_EJH.transpose(1, 2))
        bias_S1J = None if some.b13_EJ is None else some.b13_EJ.unsqueeze(1)
        inner_STI = some.compute_inner(products_STJ, some.weights_TE.T.unsqueeze(-1), bias_S1J)
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
    # The second condition excludes NaN. Otherwise, NaN in one row would affect which experts the other rows use.
    is_chosen_TE = (call.weights_TE != 0) & (call.weights_TE == call.weights_TE)
    ids_S = is_chosen_TE.float().amax(0).topk(count).indices
    size = max(GATHERED_BYTES_AT_ONCE // (call.w13_EJH[0].nbytes + call.w2_EHI[0].nbytes), 1)
    parts = [dense(call.select_experts(partial(_select, some_S))) for some_S in ids_S.split(size)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _select(ids_S: torch.Tensor, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.index_select(dim, ids_S)


GroupedProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Multiplies each group of rows in [N, in] by its own matrix from [E, in, out]. The group sizes are int64 [E]."""


def grouped(product: GroupedProduct, call: Call) -> torch.Tensor:
    """Send each token only through the experts that it chose, using copies of the tokens sorted by expert."""
    (num_tokens, num_experts), hidden = call.weights_TE.shape, call.x_TH.shape[1]
    ids_TK, weights_TK = call.chosen()
    # Sort as floats, because Ascend NPUs sort integers on their slow AI CPU.
    ids_N, order_N = ids_TK.flatten().float().sort()
    counts_E = (ids_N == torch.arange(num_experts, dtype=ids_N.dtype, device=ids_N.device).unsqueeze(-1)).sum(1)
    tokens_TK = torch.arange(num_tokens, device=ids_N.device).unsqueeze(-1).expand_as(ids_TK)
    rows_NH = call.x_TH.index_select(0, tokens_TK.flatten().index_select(0, order_N))
    weights_N1 = weights_TK.flatten().index_select(0, order_N).unsqueeze(-1)
    b13_NJ, b2_NH = (None if b is None else b.index_select(0, ids_N.long()) for b in (call.b13_EJ, call.b2_EH))
    products_NJ = product(rows_NH, call.w13_EJH.transpose(1, 2), counts_E)
    results_NH = product(call.compute_inner(products_NJ, weights_N1, b13_NJ), call.w2_EHI.transpose(1, 2), counts_E)
    if b2_NH is not None:
        results_NH = results_NH + weights_N1 * b2_NH
    # Restore the original order instead of using `index_add`, which does not add in a fixed order.
    return results_NH.index_select(0, order_N.float().argsort()).view(num_tokens, -1, hidden).sum(1)


class Fused(NamedTuple):
    run: Form
    takes: Callable[[Call], bool]
    min_tokens: int
    """The minimum number of tokens at which the operator is used."""


def choose_form(call: Call, fused: Fused | None) -> Form:
    """Choose the fastest implementation for a call, based on benchmarks/results/experts.json."""
    num_tokens, num_experts = call.weights_TE.shape
    # If tokens may choose all experts on the rank, the operator saves no computation.
    if fused and num_tokens >= fused.min_tokens and call.top_k < num_experts and fused.takes(call):
        return fused.run
    return gathered if 0 < num_tokens * call.top_k * COST_OF_GATHERING < num_experts else dense


# --- vLLM's layers ---


def register(fused: Fused | None = None) -> None:
    """Register these expert layers as replacements for vLLM's layers. Call this function once per process."""
    MoERunner.register_oot(VisibleRunner)
    UnquantizedFusedMoEMethod.register_oot(type("DeviceExperts", (Experts,), {"fused": fused}))


class VisibleRunner(MoERunner):
    """vLLM's runner without the custom operator that hides the experts from compilers and graphs."""

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
        """Scale the outputs in the same way as vLLM, but not in place.

        With several ranks, the outputs are views, and a captured graph on Gaudi cannot write through views (quirk L06).
        """
        factor = self.routed_scaling_factor
        if factor == 1.0:
            return shared_output, fused_output
        if shared_output is not None and fused_output.dtype == torch.float16:
            return shared_output * (1.0 / factor), fused_output
        return shared_output, fused_output * factor


class Experts(UnquantizedFusedMoEMethod):
    # Let vLLM leave routing to this class, because vLLM's routers use kernels for other devices.
    is_monolithic = True
    fused: Fused | None = None

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        activation = layer.activation.value
        unsupported = {
            # If inputs are weighted, an expert that was not chosen must return zero, but a bias would make it nonzero.
            "biases and weighted inputs": self.moe.has_bias and layer.apply_router_weight_on_input,
            f"activation {activation}": layer.activation not in _ACTIVATIONS,
            f"activation {activation} and a limit": self.moe.swiglu_limit is not None
            and layer.activation != MoEActivation.SWIGLUOAI,
            f"scores by {layer.scoring_func}": layer.custom_routing_function is None
            and layer.scoring_func not in _SCORINGS,
        }
        for what, is_there in unsupported.items():
            if is_there:
                raise UnsupportedConfigError(f"{layer.layer_name}: experts with {what} are not supported.")
        self.local_experts = _find_local_experts(layer.expert_map)
        super().create_weights(layer, *args, **kwargs)

    def apply_monolithic(
        self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        num_experts = self.moe.num_experts
        # If vLLM performed routing elsewhere, `router_logits` would be hidden states and would not cause an error.
        if router_logits.shape[-1] != num_experts:
            raise ValueError(f"expected router logits for {num_experts} experts, but got {router_logits.shape[-1]}")
        weights_TE = _compute_weights(layer, x, router_logits)
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
        return choose_form(call, self.fused)(call)


# --- routing ---


def _compute_weights(layer: Any, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
    """Return the weight of each expert, float32 [T, E], using the model's own routing function if it has one."""
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


def _find_local_experts(expert_map: torch.Tensor | None) -> tuple[int, int] | None:
    """Return the index of this rank's first expert and the number of its experts, or None without expert
    parallelism."""
    if expert_map is None:
        return None
    ids = (expert_map >= 0).nonzero().flatten().tolist()
    if ids != list(range(ids[0], ids[0] + len(ids))):
        raise UnsupportedConfigError("each rank must have consecutive experts; use --expert-placement-strategy linear.")
    return ids[0], len(ids)


_SCORINGS: dict[str, Activation] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
}
# Prevents a division by zero if all scores in a row are 0.
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
    """Return the weight of each expert, float32 [T, E]. Experts that were not chosen have weight 0.

    The bias affects only which experts are chosen. If the experts are in groups, the best groups are chosen first. The
    score of a group is the best score of its experts or, with a bias, the sum of their two best scores.
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

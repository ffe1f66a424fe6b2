"""Expert selection in vLLM's CPU kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_gaudi_spec.upstream.patching import patches


@patches("vllm.model_executor.layers.fused_moe.router.cpu_router:CPURouter.__init__")
def score_cpu_experts_by_sigmoid(original: Callable[..., None], router: Any, *args: Any, **named: Any) -> None:
    """Support sigmoid scores without expert groups in vLLM's CPU router, by using a single group.

    Reason: upstream supports sigmoid scores only with groups. Without groups, as in MiniMax M2, it raises
    AssertionError in the first forward pass.
    Remove when: `CPURouter` supports sigmoid without groups.
    """
    original(router, *args, **named)
    if router.scoring_func == "sigmoid" and router.custom_routing_function is None and not router.use_grouped_topk:
        router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1


@patches("vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.apply")
def assign_cpu_experts(
    original: Callable[..., Any], experts: Any, *, topk_ids: Any, topk_weights: Any, expert_map: Any, **others: Any
) -> Any:
    """Make vLLM's CPU kernel for mixture-of-experts layers skip experts that belong to other ranks.

    Reason: with `--enable-expert-parallel`, a rank has the weights of only some experts, but tokens are also routed to
    other experts. Upstream's kernel does not receive the expert map of the rank and reads past the end of the rank's
    weights.
    Remove when: `CPUUnquantizedExperts.apply` uses `expert_map`.
    """
    if expert_map is not None:
        local_ids = expert_map[topk_ids]
        # Replace the experts of other ranks with this rank's first expert and weight 0, because the kernel needs an
        # index.
        topk_weights, topk_ids = topk_weights.where(local_ids >= 0, 0.0), local_ids.clamp(min=0)
    return original(experts, topk_ids=topk_ids, topk_weights=topk_weights, expert_map=None, **others)

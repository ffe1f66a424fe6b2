"""How vLLM's CPU kernels choose experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_gaudi_spec.upstream.patching import patches


@patches("vllm.model_executor.layers.fused_moe.router.cpu_router:CPURouter.__init__")
def score_cpu_experts_by_sigmoid(original: Callable[..., None], router: Any, *args: Any, **named: Any) -> None:
    """Let vLLM's CPU router score experts by sigmoid for models without expert groups.

    Reason: upstream supports this only with groups, and raises AssertionError in the first forward of MiniMax M2. A
    single group is equivalent.
    Remove when: `CPURouter` supports sigmoid without groups.
    """
    original(router, *args, **named)
    if router.scoring_func == "sigmoid" and router.custom_routing_function is None and not router.use_grouped_topk:
        router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1


@patches("vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.apply")
def assign_cpu_experts(
    original: Callable[..., Any], experts: Any, *, topk_ids: Any, topk_weights: Any, expert_map: Any, **others: Any
) -> Any:
    """Let vLLM's CPU kernel for mixtures of experts skip the experts of other ranks.

    Reason: with `--enable-expert-parallel` a rank has the weights of some experts, but tokens are also routed to
    others. Upstream's kernel does not get the map of the rank's experts, and reads past the end of its weights.
    Remove when: `CPUUnquantizedExperts.apply` uses `expert_map`.
    """
    if expert_map is not None:
        local_ids = expert_map[topk_ids]
        # The kernel has no index for "none": another rank's expert becomes our first one, with weight 0.
        topk_weights, topk_ids = topk_weights.where(local_ids >= 0, 0.0), local_ids.clamp(min=0)
    return original(experts, topk_ids=topk_ids, topk_weights=topk_weights, expert_map=None, **others)

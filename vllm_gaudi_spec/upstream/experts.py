"""How experts are chosen by vLLM's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_gaudi_spec.upstream.patching import wrap


def score_cpu_experts_by_sigmoid() -> None:
    """Let vLLM's router for the CPU score experts by sigmoid where a model has no groups of them.

    Reason: upstream's has this for groups alone, and ends in the first forward of MiniMax M2 with an AssertionError.
    One group is the same.
    Remove when: `CPURouter` takes sigmoid without groups.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    wrap(CPURouter, "__init__", _in_one_group)


def _in_one_group(original: Callable[..., None], router: Any, *args: Any, **named: Any) -> None:
    original(router, *args, **named)
    if router.scoring_func == "sigmoid" and router.custom_routing_function is None and not router.use_grouped_topk:
        router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1

"""What several ranks of one model share, and what is each one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_gaudi_spec.compat.patching import wrap


@contextmanager
def tensor_parallel_group(group: Any) -> Iterator[None]:
    """Within, layers take `group` for their tensor-parallel group.

    Reason: with `draft_tensor_parallel_size` 1 each rank of the target runs the whole drafter, and vLLM's layers know
    one group a process, by a variable of the module.
    Remove when: layers can be told their group.
    """
    from vllm.distributed import parallel_state

    kept = parallel_state._TP
    parallel_state._TP = group
    try:
        yield
    finally:
        parallel_state._TP = kept


def assign_cpu_experts() -> None:
    """Let vLLM's experts for the CPU skip those that another rank has.

    Reason: under `--enable-expert-parallel` a rank has weights of some experts, and tokens that chose others as well;
    upstream's kernel is not given the map of the ones it has, and reads behind the end of its weights.
    Remove when: `CPUUnquantizedExperts.apply` looks at `expert_map`.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    wrap(CPUUnquantizedExperts, "apply", _own_experts_only)


def _own_experts_only(
    original: Callable[..., Any], experts: Any, *, topk_ids: Any, topk_weights: Any, expert_map: Any, **others: Any
) -> Any:
    if expert_map is not None:
        own = expert_map[topk_ids]
        # The kernel has no word for "none": another rank's expert is our first one, and counts nothing.
        topk_weights, topk_ids = topk_weights.where(own >= 0, 0.0), own.clamp(min=0)
    return original(experts, topk_ids=topk_ids, topk_weights=topk_weights, expert_map=None, **others)


@contextmanager
def ray_workers(worker_class: type) -> Iterator[None]:
    """Within, vLLM's Ray executor starts `worker_class`.

    Reason: its own asks Ray which cards a rank was given, under a name that Ray knows for a kind of card. There is none
    for a CPU.
    Remove when: upstream's executor serves CPU ranks, or can be told the class of its workers.
    """
    from vllm.v1.executor import ray_executor_v2

    kept = ray_executor_v2.RayWorkerProc
    ray_executor_v2.RayWorkerProc = worker_class
    try:
        yield
    finally:
        ray_executor_v2.RayWorkerProc = kept

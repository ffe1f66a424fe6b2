"""What the ranks of one model share, and what each has for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_gaudi_spec.upstream.patching import wrap


@contextmanager
def tensor_parallel_group(group: Any) -> Iterator[None]:
    """Within the context, `group` is the tensor-parallel group of layers.

    Reason: with `draft_tensor_parallel_size` 1 each rank of the target runs the whole drafter, and vLLM's layers
    read one group per process from a variable of the module.
    Remove when: layers take their group as an argument.
    """
    from vllm.distributed import parallel_state

    target_group = parallel_state._TP
    parallel_state._TP = group
    try:
        yield
    finally:
        parallel_state._TP = target_group


def assign_cpu_experts() -> None:
    """Let vLLM's MoE kernel for the CPU skip the experts of other ranks.

    Reason: under `--enable-expert-parallel` a rank has the weights of some experts, and tokens routed to others too;
    upstream's kernel does not get the map of the rank's experts, and reads past the end of its weights.
    Remove when: `CPUUnquantizedExperts.apply` looks at `expert_map`.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    wrap(CPUUnquantizedExperts, "apply", _own_experts_only)


def _own_experts_only(
    original: Callable[..., Any], experts: Any, *, topk_ids: Any, topk_weights: Any, expert_map: Any, **others: Any
) -> Any:
    if expert_map is not None:
        local_ids = expert_map[topk_ids]
        # The kernel has no index for "none": another rank's expert becomes our first one, with weight 0.
        topk_weights, topk_ids = topk_weights.where(local_ids >= 0, 0.0), local_ids.clamp(min=0)
    return original(experts, topk_ids=topk_ids, topk_weights=topk_weights, expert_map=None, **others)


@contextmanager
def ray_workers(worker_class: type) -> Iterator[None]:
    """Within the context, vLLM's Ray executor starts `worker_class`.

    Reason: its own asks Ray for the cards of a rank, by Ray's name of the kind of card. There is none for a CPU.
    Remove when: upstream's executor serves CPU ranks, or takes the class of its workers as an option.
    """
    from vllm.v1.executor import ray_executor_v2

    original = ray_executor_v2.RayWorkerProc
    ray_executor_v2.RayWorkerProc = worker_class
    try:
        yield
    finally:
        ray_executor_v2.RayWorkerProc = original

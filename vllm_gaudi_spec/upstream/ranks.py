"""Context managers that change which ranks a model's layers and executors use."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from vllm_gaudi_spec.upstream.patching import replaced


def tensor_parallel_group(group: Any) -> AbstractContextManager[None]:
    """Within the context, make `group` the tensor-parallel group of layers.

    Reason: with `draft_tensor_parallel_size` 1 each rank of the target runs the whole drafter, but vLLM's layers read
    one group per process from a module variable.
    Remove when: layers take their group as an argument.
    """
    from vllm.distributed import parallel_state

    return replaced(parallel_state, "_TP", group)


def ray_workers(worker_class: type) -> AbstractContextManager[None]:
    """Within the context, let vLLM's Ray executor start workers of `worker_class`.

    Reason: vLLM's own worker asks Ray for the cards of a rank by Ray's name for that kind of card. A CPU has none.
    Remove when: upstream's executor serves CPU ranks, or takes the class of its workers as an option.
    """
    from vllm.v1.executor import ray_executor_v2

    return replaced(ray_executor_v2, "RayWorkerProc", worker_class)

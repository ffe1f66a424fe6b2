"""What the ranks of one model share, and what each has for itself."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from vllm_gaudi_spec.upstream.patching import replaced


def tensor_parallel_group(group: Any) -> AbstractContextManager[None]:
    """Within the context, `group` is the tensor-parallel group of layers.

    Reason: with `draft_tensor_parallel_size` 1 each rank of the target runs the whole drafter, and vLLM's layers
    read one group per process from a variable of the module.
    Remove when: layers take their group as an argument.
    """
    from vllm.distributed import parallel_state

    return replaced(parallel_state, "_TP", group)


def ray_workers(worker_class: type) -> AbstractContextManager[None]:
    """Within the context, vLLM's Ray executor starts `worker_class`.

    Reason: its own asks Ray for the cards of a rank, by Ray's name of the kind of card. There is none for a CPU.
    Remove when: upstream's executor serves CPU ranks, or takes the class of its workers as an option.
    """
    from vllm.v1.executor import ray_executor_v2

    return replaced(ray_executor_v2, "RayWorkerProc", worker_class)

"""What the ranks of one model share, and what each has for itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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

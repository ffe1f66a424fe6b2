"""Context managers that change which ranks a model's layers use and which workers an executor starts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from vllm_gaudi_spec.upstream.patching import replaced


def tensor_parallel_group(group: Any) -> AbstractContextManager[None]:
    """Within the context, make `group` the tensor-parallel group that layers use.

    Reason: with `draft_tensor_parallel_size` 1, each target rank runs the whole drafter, but vLLM's layers get a single
    group per process from a module variable.
    Remove when: layers take their group as an argument.
    """
    from vllm.distributed import parallel_state

    return replaced(parallel_state, "_TP", group)


def pipeline_group(group: Any) -> AbstractContextManager[None]:
    """Within the context, make `group` the pipeline stages among which vLLM's model classes divide their layers.

    Reason: a drafter runs entirely on the last stage, but vLLM's model classes read a single group per process from a
    module variable.
    Remove when: model classes take their group as an argument.
    """
    from vllm.distributed import parallel_state

    return replaced(parallel_state, "_PP", group)


def ray_workers(worker_class: type) -> AbstractContextManager[None]:
    """Within the context, make vLLM's Ray executor start workers of the class `worker_class`.

    Reason: vLLM's worker requests a rank's devices under Ray's name for their type. A CPU has no such name.
    Remove when: upstream's executor supports CPU ranks or takes its worker class as an option.
    """
    from vllm.v1.executor import ray_executor_v2

    return replaced(ray_executor_v2, "RayWorkerProc", worker_class)

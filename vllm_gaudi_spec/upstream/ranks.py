"""Context managers for groups of ranks and Ray workers, and patches that handle the death of a rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from vllm_gaudi_spec.upstream.patching import patches, replaced

# The interval in seconds at which a process that waits for a message checks whether the message queue was shut down.
_LOOK_EVERY_S = 1.0
# The maximum time in seconds to wait until Ray has noticed that a rank died.
_DEATH_S = 5.0


def tensor_parallel_group(group: Any) -> AbstractContextManager[None]:
    """Return a context in which layers use `group` as their tensor-parallel group.

    Reason: with `draft_tensor_parallel_size` 1, each target rank runs the whole drafter, but vLLM's layers get a single
    group per process from a module variable.
    Remove when: layers take their group as an argument.
    """
    from vllm.distributed import parallel_state

    return replaced(parallel_state, "_TP", group)


def pipeline_group(group: Any) -> AbstractContextManager[None]:
    """Return a context in which vLLM's model classes divide their layers among the pipeline stages in `group`.

    Reason: a drafter runs entirely on the last stage, but vLLM's model classes read a single group per process from a
    module variable.
    Remove when: model classes take their group as an argument.
    """
    from vllm.distributed import parallel_state

    return replaced(parallel_state, "_PP", group)


def ray_workers(worker_class: type) -> AbstractContextManager[None]:
    """Return a context in which vLLM's Ray executor starts workers of the class `worker_class`.

    Reason: vLLM's worker asks Ray for the IDs of its accelerators, which a CPU rank does not have.
    Remove when: upstream's executor supports CPU ranks or takes its worker class as an option.
    """
    from vllm.v1.executor import ray_executor_v2

    return replaced(ray_executor_v2, "RayWorkerProc", worker_class)


@patches("vllm.distributed.device_communicators.shm_broadcast:MessageQueue.dequeue")
def end_reads_from_other_machines(
    original: Callable[..., Any], queue: Any, timeout: float | None = None, *args: Any, **named: Any
) -> Any:
    """Stop waiting for a message from another machine when the message queue is shut down.

    Reason: when a rank dies, vLLM shuts down its queues, but this ends only reads from shared memory. If the machine
    with the last pipeline stage dies, the engine waits for it until VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS has passed.
    Remove when: `MessageQueue.shutdown` also ends reads from other machines.
    """
    if not queue._is_remote_reader:
        return original(queue, timeout, *args, **named)
    deadline = sys.maxsize if timeout is None else time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0 and not queue.remote_socket.poll(min(left, _LOOK_EVERY_S) * 1000):
        if queue.shutting_down:
            raise RuntimeError("cancelled")
    return original(queue, 0, *args, **named)


@patches("vllm.v1.engine.core:EngineCoreProc._send_engine_dead")
def name_dead_ranks(original: Callable[..., None], engine: Any) -> None:
    """Before an engine reports its failure to the server, wait until vLLM's monitor of Ray workers has logged which
    rank died.

    If no rank died, this delays the exit by five seconds.

    Reason: other ranks notice a death first, because their collectives fail. The server then exits within a second, and
    the log contains only the address of the broken connection.
    Remove when: upstream's error for a failed worker names the rank that died.
    """
    if (monitor := getattr(engine.model_executor, "_monitor_thread", None)) is not None:
        monitor.join(_DEATH_S)
    original(engine)

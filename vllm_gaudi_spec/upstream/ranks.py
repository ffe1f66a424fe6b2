"""Context managers that change which ranks a model's layers use and which workers an executor starts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from vllm_gaudi_spec.upstream.patching import patches, replaced

# Interval in seconds at which a reader of another machine's messages checks whether its queue was shut down.
_LOOK_EVERY_S = 1.0
# Time in seconds that Ray has to notice that a rank has died.
_DEATH_S = 5.0


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


@patches("vllm.distributed.device_communicators.shm_broadcast:MessageQueue.dequeue")
def end_reads_from_other_machines(
    original: Callable[..., Any], queue: Any, timeout: float | None = None, *args: Any, **named: Any
) -> Any:
    """Raise an error in a read from another machine once its queue is shut down.

    Reason: when a rank dies, vLLM shuts its queues down, which ends reads from shared memory only. If the last pipeline
    stage is on a machine that died, the engine waits for it until VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS.
    Remove when: `MessageQueue.shutdown` ends these reads, too.
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
    """Before a failed engine ends its server, wait until vLLM's monitor of Ray workers has logged which rank died.

    If no rank died, this delays the end of the server by five seconds.

    Reason: other ranks notice a death first, because their collectives fail. The server then ends within a second, and
    the log has no more than the address of a connection.
    Remove when: upstream's error for a failed worker names the rank that died.
    """
    if (monitor := getattr(engine.model_executor, "_monitor_thread", None)) is not None:
        monitor.join(_DEATH_S)
    original(engine)

"""NPU graphs. Fused operations that take lengths on the host get new ones before their graph runs again.

Such an operation is recorded as a group of tasks. Before the graph is replayed it is issued once more on a stream for
updates, which computes nothing and writes its arguments into the recorded tasks. On the device the updates of a graph
wait for its last run, and its next run for them; the host waits for nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.common.stream_graphs import Captures, Recorded

# How CANN reports that graphs have taken all streams of a card.
_NO_STREAMS_LEFT = ("207008", "stream resources are insufficient", "insufficient_stream_resources")


class HostLengthsOperation(NamedTuple):
    """A fused operation that takes lengths on the host, in the form that writes to memory of the caller."""

    run: Callable[..., Any]
    workspace: Callable[..., torch.Tensor]
    """What that form needs besides, by the operation's arguments."""
    lengths: str
    """The argument that is a list on the host."""


class _Task(NamedTuple):
    """One operation of a recorded graph."""

    operation: HostLengthsOperation
    arguments: dict[str, Any]
    lengths_B: torch.Tensor
    """The graph's buffer on the host."""
    handle: Any


class NpuCaptures(Captures):
    def __init__(self, runtime: Any, device: torch.device) -> None:
        super().__init__(runtime, runtime.NPUGraph, device)
        self._tasks: list[_Task] | None = None
        """Of the graph that is being recorded."""
        self._updates: Any = None

    def record(self, run: Callable[[], None]) -> Recorded:
        tasks: list[_Task] = []
        self._tasks = tasks
        try:
            graph = super().record(run)
        except RuntimeError as error:
            if not any(mark in str(error).lower() for mark in _NO_STREAMS_LEFT):
                raise
            raise UnsupportedConfigError(
                f"the card has no room for more than {len(self.names)} graphs ({error}); give fewer sizes as "
                "batch_buckets and prefill_buckets in additional_config.gaudi_spec, or lower --max-num-seqs."
            ) from error
        finally:
            self._tasks = None
        if self._updates is None:
            self._updates = self._runtime.Stream()
        return _Updated(graph, tasks, self._runtime, self._updates) if tasks else graph

    def issue(
        self,
        operation: HostLengthsOperation,
        arguments: dict[str, Any],
        lengths_B: torch.Tensor,
        longest: int,
        out: list[torch.Tensor],
    ) -> None:
        """Run `operation` into `out`. `lengths_B`, an argument of the graph, is never above `longest`."""
        arguments_now = arguments | {operation.lengths: lengths_B.tolist()}
        # Enough for all lengths that the recorded operation will get.
        workspace = operation.workspace(**arguments, **{operation.lengths: [longest] * len(lengths_B)})
        outputs = {"workspace": workspace, "out": out}
        if self._tasks is None:
            operation.run(**arguments_now, **outputs)
            return
        stream = self._runtime.current_stream()
        self._runtime.graph_task_group_begin(stream)
        operation.run(**arguments_now, **outputs)
        handle = self._runtime.graph_task_group_end(stream)
        # Kept for updates is where things lie: were it the tensors, no memory of the graph could be shared.
        references = {name: _weak_reference(value) for name, value in (arguments | outputs).items()}
        self._tasks.append(_Task(operation, references, lengths_B, handle))


class _Updated:
    """A graph with such operations."""

    def __init__(self, graph: Recorded, tasks: list[_Task], runtime: Any, updates: Any) -> None:
        self._graph = graph
        self._tasks = tasks
        self._runtime = runtime
        self._updates = updates
        self._written, self._done = runtime.Event(), runtime.Event()
        self._buffers = list({id(task.lengths_B): task.lengths_B for task in tasks}.values())

    def replay(self) -> None:
        runtime, updates = self._runtime, self._updates
        lengths = {id(buffer): buffer.tolist() for buffer in self._buffers}
        updates.wait_event(self._done)
        with runtime.stream(updates):
            for operation, arguments, lengths_B, handle in self._tasks:
                runtime.graph_task_update_begin(updates, handle)
                operation.run(**arguments, **{operation.lengths: lengths[id(lengths_B)]})
                runtime.graph_task_update_end(updates)
            self._written.record(updates)
        runtime.current_stream().wait_event(self._written)
        self._graph.replay()
        self._done.record()


def _weak_reference(value: Any) -> Any:
    if isinstance(value, list):
        return [_weak_reference(item) for item in value]
    if isinstance(value, torch.Tensor):
        return importlib.import_module("torch_npu")._C._weak_ref_tensor(value)
    return value

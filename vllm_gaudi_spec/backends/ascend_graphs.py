"""NPU graphs. Fused operations that were told lengths on the host are told new ones before their graph runs again.

Such an operation is recorded as a group of tasks behind an event. Before the graph is replayed it is issued once more
on a stream for updates, which computes nothing and writes what it is told into the recorded tasks, and then lets the
event through. The updates of a graph wait on the device for its last run, and the host for nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vllm_gaudi_spec.backends.stream_graphs import Captures, Recorded


class HostTold(NamedTuple):
    """A fused operation with a form that writes to given memory."""

    run: Callable[..., Any]
    workspace: Callable[..., torch.Tensor]
    """What that form needs besides, by the operation's arguments."""
    lengths: str
    """The argument that is a list on the host."""


class _Task(NamedTuple):
    """One operation of a recorded graph."""

    operation: HostTold
    arguments: dict[str, Any]
    lengths_B: torch.Tensor
    """The program's buffer on the host."""
    handle: Any
    ready: Any
    """An event that the graph waits for before the operation."""


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
        finally:
            self._tasks = None
        if self._updates is None:
            self._updates = self._runtime.Stream()
        return _Updated(graph, tasks, self._runtime, self._updates) if tasks else graph

    def issue(
        self, operation: HostTold, arguments: dict[str, Any], lengths_B: torch.Tensor, out: list[torch.Tensor]
    ) -> None:
        """Run `operation` into `out`. `lengths_B` is an argument of the program."""
        told = arguments | {operation.lengths: lengths_B.tolist()}
        if self._tasks is None:
            operation.run(**told, workspace=operation.workspace(**told), out=out)
            return
        stream = self._runtime.current_stream()
        ready = self._runtime.ExternalEvent()
        ready.wait(stream)
        ready.reset(stream)
        given = {"workspace": operation.workspace(**told), "out": out}
        self._runtime.graph_task_group_begin(stream)
        operation.run(**told, **given)
        handle = self._runtime.graph_task_group_end(stream)
        # What is kept for updates is where things lie: were it the tensors, no memory of the graph could be shared.
        kept = {name: _place_of(value) for name, value in (arguments | given).items()}
        self._tasks.append(_Task(operation, kept, lengths_B, handle, ready))


class _Updated:
    """A graph with such operations."""

    def __init__(self, graph: Recorded, tasks: list[_Task], runtime: Any, updates: Any) -> None:
        self._graph = graph
        self._tasks = tasks
        self._runtime = runtime
        self._updates = updates
        self._done = runtime.Event()

    def replay(self) -> None:
        runtime, updates = self._runtime, self._updates
        updates.wait_event(self._done)
        with runtime.stream(updates):
            for operation, arguments, lengths_B, handle, ready in self._tasks:
                runtime.graph_task_update_begin(updates, handle)
                operation.run(**arguments, **{operation.lengths: lengths_B.tolist()})
                runtime.graph_task_update_end(updates)
                ready.record(updates)
        self._graph.replay()
        self._done.record()


def _place_of(value: Any) -> Any:
    if isinstance(value, list):
        return [_place_of(item) for item in value]
    if isinstance(value, torch.Tensor):
        return importlib.import_module("torch_npu")._C._weak_ref_tensor(value)
    return value

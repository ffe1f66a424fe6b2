"""NPU graphs. Fused operations that take lengths on the host get new ones before their graph runs again.

Such an operation is recorded as a group of tasks. Before the graph is replayed with other lengths it is issued once
more on a stream for updates, which computes nothing and writes its arguments into the recorded tasks. On the device the
updates of a graph wait for its last run, and its next run for them; the host waits for nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm.logger import init_logger

from vllm_gaudi_spec.config import UnsupportedConfigError, in_one_line
from vllm_gaudi_spec.devices.ascend import errors
from vllm_gaudi_spec.devices.ascend.constants import Constants
from vllm_gaudi_spec.devices.common.stream_graphs import Captures, Recorded

logger = init_logger(__name__)


class HostLengthsOperation(NamedTuple):
    """A fused operation that takes lengths on the host, in the form that writes to memory of the caller."""

    run: Callable[..., Any]
    workspace: Callable[..., torch.Tensor]
    """What that form needs besides, by the operation's arguments."""
    lengths: str
    """The argument that is a list on the host."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of some rows of a graph, how many keys they have at most."""

    lengths_B: torch.Tensor
    """The graph's argument, on the host."""
    rows: slice
    step: int
    """They are rounded up to its multiples, so that most steps have those of the step before and need no update."""
    longest: int
    """Never more."""

    def now(self) -> list[int]:
        return [min(-(-length // self.step) * self.step, self.longest) for length in self.lengths_B[self.rows].tolist()]

    def longest_of_all(self) -> list[int]:
        return [self.longest] * len(self.lengths_B[self.rows])


class _Task(NamedTuple):
    """One operation of a recorded graph."""

    operation: HostLengthsOperation
    arguments: dict[str, Any]
    bounds: Bounds
    handle: Any


class NpuCaptures(Captures):
    def __init__(self, runtime: Any, device: torch.device) -> None:
        super().__init__(runtime, runtime.NPUGraph, device)
        self._tasks: list[_Task] | None = None
        """Of the graph that is being recorded."""
        self._updates: Any = None
        self._constants = Constants()

    def first_run(self) -> AbstractContextManager[None]:
        return self._constants.finding()

    def second_run(self) -> AbstractContextManager[None]:
        return self._constants.using()

    def record(self, run: Callable[[], None]) -> Recorded:
        tasks: list[_Task] = []
        self._tasks = tasks
        try:
            graph = super().record(run)
        except RuntimeError as error:
            if errors.has_no_room(str(error)):
                raise UnsupportedConfigError(
                    f"the card has no room for more than {len(self.names)} graphs ({in_one_line(error)}); give fewer "
                    "sizes as batch_buckets and prefill_buckets in additional_config.gaudi_spec, or lower "
                    "--max-num-seqs. Drivers before HDK 25.5.1 have room for fewer."
                ) from error
            for code in errors.codes_in(str(error)):
                meaning, remedy = errors.CODES[code]
                logger.error("CANN's error %d while a graph was captured: %s; %s.", code, meaning, remedy)
            raise
        finally:
            self._tasks = None
        if self._updates is None:
            self._updates = self._runtime.Stream()
        return _Updated(graph, tasks, self._runtime, self._updates) if tasks else graph

    def issue(
        self,
        operation: HostLengthsOperation,
        arguments: dict[str, Any],
        bounds: Bounds,
        out: list[torch.Tensor],
    ) -> None:
        """Run `operation` into `out`."""
        arguments_now = arguments | {operation.lengths: bounds.now()}
        # Enough for all lengths that the recorded operation will get.
        workspace = operation.workspace(**arguments, **{operation.lengths: bounds.longest_of_all()})
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
        self._tasks.append(_Task(operation, references, bounds, handle))


class _Updated:
    """A graph with such operations."""

    def __init__(self, graph: Recorded, tasks: list[_Task], runtime: Any, updates: Any) -> None:
        self._graph = graph
        self._tasks = tasks
        self._runtime = runtime
        self._updates = updates
        self._written, self._done = runtime.Event(), runtime.Event()
        self._bounds = list({id(task.bounds): task.bounds for task in tasks}.values())
        self._recorded = self._bounds_now()
        """What the graph's tasks have, as lists."""

    def replay(self) -> None:
        now = self._bounds_now()
        if now != self._recorded:
            self._update(now)
            self._recorded = now
        self._graph.replay()
        self._done.record()

    def _bounds_now(self) -> dict[int, list[int]]:
        return {id(bounds): bounds.now() for bounds in self._bounds}

    def _update(self, now: dict[int, list[int]]) -> None:
        runtime, updates = self._runtime, self._updates
        updates.wait_event(self._done)
        with runtime.stream(updates):
            for operation, arguments, bounds, handle in self._tasks:
                runtime.graph_task_update_begin(updates, handle)
                operation.run(**arguments, **{operation.lengths: now[id(bounds)]})
                runtime.graph_task_update_end(updates)
            self._written.record(updates)
        runtime.current_stream().wait_event(self._written)


def _weak_reference(value: Any) -> Any:
    if isinstance(value, list):
        return [_weak_reference(item) for item in value]
    if isinstance(value, torch.Tensor):
        return importlib.import_module("torch_npu")._C._weak_ref_tensor(value)
    return value

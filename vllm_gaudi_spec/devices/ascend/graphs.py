"""NPU graphs whose fused operators get new lengths from the host before each replay.

Each of these operators is captured as a task group. Before a replay with different lengths, the operator is issued
again on an update stream, which writes its arguments into the captured tasks without computing anything. On the device,
the updates wait for the graph's previous run, and the next run waits for the updates. The host does not wait.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from vllm_gaudi_spec.config import UnsupportedConfigError, in_one_line
from vllm_gaudi_spec.devices.ascend.errors import has_no_room
from vllm_gaudi_spec.devices.common.stream_device import Captures, Recorded


class HostLengthsOperation(NamedTuple):
    """A fused operator that takes lengths from the host, in the variant that writes its results to given tensors."""

    run: Callable[..., Any]
    workspace: Callable[..., torch.Tensor]
    """Returns the workspace that this variant needs for the given arguments."""


class HostLengths(Protocol):
    """An operator's arguments that are lists of lengths in host memory, keyed by name."""

    def get_current_arguments(self) -> dict[str, list[int]]: ...

    def get_longest_arguments(self) -> dict[str, list[int]]: ...


class _Task(NamedTuple):
    operation: HostLengthsOperation
    arguments: dict[str, Any]
    lengths: HostLengths
    handle: Any


class NpuCaptures(Captures):
    def __init__(self, runtime: Any, device: torch.device) -> None:
        super().__init__(runtime, runtime.NPUGraph, device)
        self._tasks: list[_Task] | None = None
        """The tasks in the graph that is being captured."""
        self._updates: Any = None

    def record(self, run: Callable[[], None]) -> Recorded:
        tasks: list[_Task] = []
        self._tasks = tasks
        try:
            graph = super().record(run)
        except RuntimeError as error:
            if has_no_room(str(error)):
                raise UnsupportedConfigError(
                    f"the card has no room for more than {len(self.names)} graphs ({in_one_line(error)}); give fewer "
                    "sizes as batch_buckets and prefill_buckets in additional_config.gaudi_spec, or lower "
                    "--max-num-seqs. Drivers before HDK 25.5.1 have room for fewer."
                ) from error
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
        lengths: HostLengths,
        out: list[torch.Tensor],
    ) -> None:
        """Run `operation` and write its results to `out`."""
        with_lengths = arguments | lengths.get_current_arguments()
        # The workspace must be large enough for any lengths that the captured operator may receive.
        workspace = operation.workspace(**arguments, **lengths.get_longest_arguments())
        outputs = {"workspace": workspace, "out": out}
        if self._tasks is None:
            operation.run(**with_lengths, **outputs)
            return
        stream = self._runtime.current_stream()
        self._runtime.graph_task_group_begin(stream)
        operation.run(**with_lengths, **outputs)
        handle = self._runtime.graph_task_group_end(stream)
        # Keep only weak references, so that the graph can reuse the memory of these tensors.
        references = {name: _make_weak(value) for name, value in (arguments | outputs).items()}
        self._tasks.append(_Task(operation, references, lengths, handle))


class _Updated:
    """A graph whose operators take lengths from the host."""

    def __init__(self, graph: Recorded, tasks: list[_Task], runtime: Any, updates: Any) -> None:
        self._graph = graph
        self._tasks = tasks
        self._runtime = runtime
        self._updates = updates
        self._written, self._done = runtime.Event(), runtime.Event()
        self._lengths = list({id(task.lengths): task.lengths for task in tasks}.values())
        self._recorded = self._lengths_now()
        """The lengths that are currently stored in the graph's tasks."""

    def replay(self) -> None:
        now = self._lengths_now()
        if now != self._recorded:
            self._update(now)
            self._recorded = now
        self._graph.replay()
        self._done.record()

    def _lengths_now(self) -> dict[int, dict[str, list[int]]]:
        return {id(lengths): lengths.get_current_arguments() for lengths in self._lengths}

    def _update(self, now: dict[int, dict[str, list[int]]]) -> None:
        runtime, updates = self._runtime, self._updates
        updates.wait_event(self._done)
        with runtime.stream(updates):
            for operation, arguments, lengths, handle in self._tasks:
                runtime.graph_task_update_begin(updates, handle)
                operation.run(**arguments, **now[id(lengths)])
                runtime.graph_task_update_end(updates)
            self._written.record(updates)
        runtime.current_stream().wait_event(self._written)


def _make_weak(value: Any) -> Any:
    if isinstance(value, list):
        return [_make_weak(item) for item in value]
    if isinstance(value, torch.Tensor):
        return importlib.import_module("torch_npu")._C._weak_ref_tensor(value)
    return value

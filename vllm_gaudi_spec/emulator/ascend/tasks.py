"""Groups of operations in an NPU graph that are given new arguments between replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from vllm_gaudi_spec.emulator.ascend.graphs import NpuCapture, TaskGroup, count_again
from vllm_gaudi_spec.emulator.ascend.streams import Stream, current_stream
from vllm_gaudi_spec.emulator.card import DEVICE, DeviceRefusal
from vllm_gaudi_spec.emulator.counters import Tally
from vllm_gaudi_spec.emulator.program import Capture
from vllm_gaudi_spec.emulator.source import here
from vllm_gaudi_spec.emulator.tensor import DeviceTensor, Operation, real


class TaskUpdate(Capture):
    """Open while a group's operations are issued again: they are noted, and nothing is computed."""

    what = "the update of a task group"
    computes = False

    def __init__(self, group: TaskGroup, stream: Stream) -> None:
        super().__init__("update")
        self.group = group
        self.stream = stream
        self.names: list[str] = []
        self.outside, DEVICE.counters.step = DEVICE.counters.step, Tally()

    def record(self, operation: Operation) -> None:
        info, run, args, kwargs, _, new, _ = operation
        if not info.computes(new):
            # A view: of the same memory, and no task.
            if any(isinstance(arg, DeviceTensor) and arg.ghost for arg in args):
                raise DeviceRefusal(
                    f"during {self.what}: a view of memory that is known by its address only, at {here()}"
                )
            viewed = run(*(real(arg) if isinstance(arg, DeviceTensor) else arg for arg in args), **kwargs)
            new[0].inner, new[0].ghost = viewed, False
            return
        if new:
            raise DeviceRefusal(f"during {self.what}: {info.name} at {here()} makes new memory; use its `.out` form")
        super().record(operation)
        self.names.append(info.name)

    def owns(self, tensor: DeviceTensor) -> bool:
        """Addresses of the graph stand for what the graph has there when it comes to the group."""
        return tensor.capture is self.group.capture

    def record_kernel(self, run: Callable[..., Any], args: Sequence[Any]) -> NoReturn:
        raise DeviceRefusal(f"during {self.what}: something else than an operation of the group, at {here()}")


def _capturing(what: str) -> NpuCapture:
    capture = DEVICE.capture
    if not isinstance(capture, NpuCapture):
        raise DeviceRefusal(f"{what} at {here()} outside of a capture")
    return capture


def graph_task_group_begin(stream: Stream) -> None:
    _capturing("graph_task_group_begin").begin_group(stream)


def graph_task_group_end(stream: Stream) -> TaskGroup:
    return _capturing("graph_task_group_end").end_group(stream)


def graph_task_update_begin(stream: Stream, handle: TaskGroup) -> None:
    DEVICE.refuse_in_capture("graph_task_update_begin")
    if not isinstance(handle, TaskGroup):
        raise TypeError(f"graph_task_update_begin takes what graph_task_group_end returned, not {type(handle)}")
    if stream is not current_stream():
        raise DeviceRefusal(
            f"graph_task_update_begin at {here()}: its stream is not the current one, so what comes next would not be "
            "a part of the update"
        )
    last = handle.graph.last_replay
    if last is not None and not stream.follows(last):
        raise DeviceRefusal(
            f"graph_task_update_begin at {here()}: the stream did not wait for the last replay of the graph, which may "
            "still be running the tasks that are changed"
        )
    DEVICE.capture = TaskUpdate(handle, stream)


def graph_task_update_end(stream: Stream) -> None:
    update = DEVICE.capture
    if not isinstance(update, TaskUpdate):
        raise DeviceRefusal(f"graph_task_update_end at {here()} without graph_task_update_begin")
    DEVICE.capture = None
    work = count_again(update.outside)
    if stream is not update.stream:
        raise DeviceRefusal(f"graph_task_update_end at {here()}: the update began on another stream")
    recorded = list(update.group.tasks.values())
    if update.names != recorded:
        raise DeviceRefusal(f"graph_task_update_end at {here()}: the group has {recorded}, the update {update.names}")
    update.group.graph.update(update.group, update.program.calls, work)


CONTENTS: dict[str, Any] = {
    function.__name__: function
    for function in (
        graph_task_group_begin,
        graph_task_group_end,
        graph_task_update_begin,
        graph_task_update_end,
    )
}

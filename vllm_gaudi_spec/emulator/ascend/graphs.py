"""NPU graphs: a piece of Python run once without computing anything, its operations replayed on the same memory."""

from __future__ import annotations

import weakref
from dataclasses import fields
from typing import Any

import torch

from vllm_gaudi_spec.emulator.ascend.streams import STREAMS, Stream, Work, current_stream, synchronize
from vllm_gaudi_spec.emulator.card import DEVICE, Allocation, DeviceRefusal, GraphRecord
from vllm_gaudi_spec.emulator.counters import Tally
from vllm_gaudi_spec.emulator.ops import OpInfo
from vllm_gaudi_spec.emulator.program import REPEATED, Call, Capture, Program, count_replay
from vllm_gaudi_spec.emulator.source import here
from vllm_gaudi_spec.emulator.tensor import DeviceTensor, Operation

_ERROR_MODES = ("global", "thread_local", "relaxed")


class Pool:
    """Memory that graphs share: they run one after another, so that it is as large as the largest needs it. It goes
    with the last of them."""

    def __init__(self) -> None:
        self.gone = False
        self._nbytes = 0
        self._num_graphs = 0
        self._records = DEVICE.graphs

    def enter(self, nbytes: int) -> None:
        more = max(nbytes - self._nbytes, 0)
        DEVICE.charge_graph(more)
        self._nbytes += more
        self._num_graphs += 1

    def leave(self) -> None:
        self._num_graphs -= 1
        if not self._num_graphs:
            self.gone = True
            if self.is_counted:
                DEVICE.graph_bytes -= self._nbytes

    @property
    def is_counted(self) -> bool:
        """Not after the card was reset."""
        return DEVICE.graphs is self._records


class TaskGroup:
    """Operations of a graph that may be given new arguments; the handle of graph_task_group_end."""

    def __init__(self, graph: NPUGraph, capture: NpuCapture) -> None:
        self.graph = graph
        self.capture = capture
        """Where its tensors come from."""
        self.tasks: dict[int, str] = {}
        """Names of operations by their number in the graph."""
        self.work = Tally()


class NpuCapture(Capture):
    what = "NPU graph capture"
    computes = False

    def __init__(self, graph: NPUGraph, stream: Stream, pool: Pool) -> None:
        super().__init__("NPUGraph", track_results=True)
        self.graph = graph
        self.stream = stream
        self.pool = pool
        self.groups: list[TaskGroup] = []
        self.open_group: TaskGroup | None = None
        self._before_group = Tally()
        self._origins: dict[int, tuple[int, DeviceTensorGeometry]] = {}

    def record(self, operation: Operation) -> None:
        super().record(operation)
        if self.open_group is not None and operation.info.computes(operation.new):
            self.open_group.tasks[len(self.program.calls) - 1] = operation.info.name

    def begin_group(self, stream: Stream) -> None:
        self._check_stream(stream, "graph_task_group_begin")
        if self.open_group is not None:
            raise DeviceRefusal(f"graph_task_group_begin at {here()}: the group before is not closed")
        self.open_group = TaskGroup(self.graph, self)
        self._before_group = Tally()
        self._before_group.add(DEVICE.counters.step)

    def end_group(self, stream: Stream) -> TaskGroup:
        self._check_stream(stream, "graph_task_group_end")
        group, self.open_group = self.open_group, None
        if group is None:
            raise DeviceRefusal(f"graph_task_group_end at {here()} without graph_task_group_begin")
        if not group.tasks:
            raise DeviceRefusal(f"graph_task_group_end at {here()}: the group has no operations")
        for name in REPEATED:
            setattr(group.work, name, getattr(DEVICE.counters.step, name) - getattr(self._before_group, name))
        self.groups.append(group)
        return group

    def _check_stream(self, stream: Stream, what: str) -> None:
        if stream is not self.stream:
            raise DeviceRefusal(f"{what} at {here()} names a stream that is not the one being captured")

    def _new_slot(self, tensor: DeviceTensor, info: OpInfo) -> int:
        slot = super()._new_slot(tensor, info)
        if self._sizes[slot] or not (tensor.part or info.view):
            inner = tensor.inner
            self._origins[id(tensor.memory)] = (slot, (inner.shape, inner.stride(), inner.dtype))
        return slot

    def close(self) -> tuple[Program, int]:
        """Give what outlives the capture its home in memory, where every replay puts it."""
        alive = [tensor for tensor in (ref() for ref in self.made or ()) if tensor is not None]
        foreign = {id(tensor.memory): tensor.inner for tensor in self.externals.values()}
        homes: dict[int, torch.Tensor] = {}
        for tensor in alive:
            memory = id(tensor.memory)
            if memory in foreign:
                home = foreign[memory]
            else:
                if memory not in self._origins:
                    raise DeviceRefusal(f"{self.what}: a view of memory that is known by its address only is kept")
                slot, geometry = self._origins[memory]
                if slot not in homes:
                    homes[slot] = _poisoned(geometry)
                    self._sizes[slot] = 0  # counted as the tensor's
                home = homes[slot]
            _settle(tensor, home)
        program, nbytes = self.finish(set(homes))
        moved = _put_into_homes(program, homes)
        for group in self.groups:
            group.tasks = {moved[number]: name for number, name in group.tasks.items()}
        return program, nbytes


DeviceTensorGeometry = tuple[torch.Size, tuple[int, ...], torch.dtype]


def _poisoned(geometry: DeviceTensorGeometry) -> torch.Tensor:
    """What memory of a graph holds before the first replay: nothing that anybody could use."""
    shape, stride, dtype = geometry
    made = torch.empty_strided(shape, stride, dtype=dtype)
    if dtype.is_floating_point:
        return made.fill_(float("nan"))
    return made.fill_(True if dtype is torch.bool else torch.iinfo(dtype).max)


def _settle(tensor: DeviceTensor, home: torch.Tensor) -> None:
    """Make a tensor of the capture one with memory, a part of `home`'s."""
    meta = tensor.inner
    tensor.inner = torch.empty(0, dtype=meta.dtype).set_(
        home.untyped_storage(), meta.storage_offset(), meta.shape, meta.stride()
    )
    tensor.ghost, tensor.twin, tensor.capture = False, None, None


def _put_into_homes(program: Program, homes: dict[int, torch.Tensor]) -> list[int]:
    """Copy what lands in these slots to its home; returns where each call has moved."""
    calls, lines, moved = program.calls, program.lines, []
    program.calls, program.lines = [], []
    for call, line in zip(calls, lines, strict=True):
        moved.append(len(program.calls))
        program.calls.append(call)
        program.lines.append(line)
        for slot in (call.outs,) if isinstance(call.outs, int) else call.outs:
            if slot in homes:
                args: list[Any] = [homes[slot], None]
                program.calls.append(Call(torch.Tensor.copy_, args, {}, [(args, 1, slot)], slot, []))
                program.lines.append(line)
    return moved


def count_again(outside: Tally) -> Tally:
    """Go on with the counts of before, and what other threads did meanwhile; the answer is what was recorded."""
    work, DEVICE.counters.step = DEVICE.counters.step, outside
    for field in fields(Tally):
        if field.name not in REPEATED:
            setattr(outside, field.name, getattr(outside, field.name) + getattr(work, field.name))
    return work


class NPUGraph:
    def __init__(self) -> None:
        self._program: Program | None = None
        self._pool: Pool | None = None
        self.work = Tally()
        self.last_replay: Work | None = None
        self._updates: dict[int, Work] = {}
        """The last one on each stream."""
        self._lost: list[str] = []
        self._watched: list[weakref.ref[Any]] = []

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        DEVICE.refuse_in_capture("a second capture begins")
        if self._program is not None:
            raise RuntimeError(
                "This NPUGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        if capture_error_mode not in _ERROR_MODES:
            raise RuntimeError(f"Unknown capture error mode. Expected one of {_ERROR_MODES}, got {capture_error_mode}")
        stream = current_stream()
        if stream is STREAMS.default_stream():
            raise RuntimeError("NPU graphs must be captured on a non-default stream.")
        if pool is not None and pool.gone:
            raise RuntimeError("the memory pool went with its last graph; ask graph_pool_handle for another")
        if DEVICE.blocked is not None:
            raise DeviceRefusal(DEVICE.blocked)
        DEVICE.opened()
        self._where = here()
        self._outside, DEVICE.counters.step = DEVICE.counters.step, Tally()
        DEVICE.capture = NpuCapture(self, stream, pool or Pool())

    def capture_end(self) -> None:
        capture = DEVICE.capture
        if not isinstance(capture, NpuCapture) or capture.graph is not self:
            raise RuntimeError("capture_end() called before capture_begin().")
        work = self.abandon()
        if current_stream() is not capture.stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        if capture.open_group is not None:
            raise DeviceRefusal(f"capture_end at {here()}: a task group is not closed")
        program, nbytes = capture.close()
        capture.pool.enter(nbytes)
        self._pool, self._program, self.work = capture.pool, program, work
        DEVICE.graphs_held += 1
        for tensor in capture.externals.values():
            self._watch(tensor)
        capture.externals.clear()
        self._record = GraphRecord("NPUGraph", "", self._where, len(program.calls), nbytes)
        DEVICE.graphs.append(self._record)
        DEVICE.compiled("graph capture", "NPUGraph", self._where)

    def abandon(self) -> Tally:
        """The capture is over, whatever became of it."""
        DEVICE.capture = None
        return count_again(self._outside)

    def _watch(self, tensor: DeviceTensor) -> None:
        """A graph does not keep what it reads alive: on a card its memory would be somebody else's by then."""
        what = f"a tensor of {tuple(tensor.shape)}, {tensor.dtype}"
        lost = self._lost
        self._watched.append(weakref.ref(tensor.memory, lambda _: lost.append(what)))

    def replay(self) -> None:
        DEVICE.refuse_in_capture("a graph is replayed")
        program = self._captured("replay")
        if self._lost:
            raise DeviceRefusal(
                f"a graph captured at {self._where} is replayed at {here()}, but memory that it uses was freed: "
                f"{self._lost[0]}"
            )
        stream = current_stream()
        if not all(stream.follows(update) for update in self._updates.values()):
            raise DeviceRefusal(
                f"a graph is replayed at {here()}, on a stream that did not wait for the last update of its tasks: it "
                "may run with the old arguments, or with some of both"
            )
        self.last_replay = stream.issue()
        program.run([])
        count_replay(self.work, self._record)

    def reset(self) -> None:
        DEVICE.refuse_in_capture("a graph is reset")
        self._free()

    def _free(self) -> None:
        if self._program is not None and self._pool is not None:
            self._pool.leave()
            if self._pool.is_counted:
                DEVICE.graphs_held -= 1
        self._program = None
        self._watched.clear()

    def __del__(self) -> None:
        # At interpreter exit the module's names may be gone before the last graph.
        if DEVICE is not None:
            self._free()

    def pool(self) -> Pool:
        self._captured("pool()")
        assert self._pool is not None
        return self._pool

    def _captured(self, what: str) -> Program:
        if self._program is None:
            raise RuntimeError(f"Called NPUGraph::{what} without a preceding successful capture.")
        return self._program

    def update(self, group: TaskGroup, calls: list[Call], work: Tally) -> None:
        """Replace the calls of the group by the new ones."""
        program = self._captured("update")
        for number, call in zip(group.tasks, calls, strict=True):
            program.calls[number] = call._replace(dead=program.calls[number].dead)
        for name in REPEATED:
            old = getattr(self.work, name) - getattr(group.work, name)
            setattr(self.work, name, old + getattr(work, name))
        group.work = work
        number, _ = update = current_stream().issue()
        self._updates[number] = update


class graph:
    """Captures what is issued inside."""

    _own_stream: Stream | None = None

    def __init__(
        self,
        npu_graph: NPUGraph,
        pool: Pool | None = None,
        stream: Stream | None = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> None:
        if auto_dispatch_capture:
            raise NotImplementedError("torch.npu.graph: auto_dispatch_capture is not emulated")
        if graph._own_stream is None:
            graph._own_stream = Stream()
        self._graph, self._pool, self._mode = npu_graph, pool, capture_error_mode
        self._inside = STREAMS.stream(stream or graph._own_stream)

    def __enter__(self) -> None:
        synchronize()
        self._inside.__enter__()
        try:
            self._graph.capture_begin(pool=self._pool, capture_error_mode=self._mode)
        except BaseException:
            self._inside.__exit__(None, None, None)
            raise

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if error is None:
                self._graph.capture_end()
            else:
                self._graph.abandon()
        finally:
            self._inside.__exit__(None, None, None)


def weak_ref_tensor(tensor: DeviceTensor) -> DeviceTensor:
    """A tensor at the same address that does not keep the memory. Of one that a graph makes for itself it names the
    address, and can be given to updates of that graph alone."""
    reference = DeviceTensor(tensor.inner, Allocation(0), part=True)
    reference.memory.kv = tensor.memory.kv
    reference.capture, reference.slot = tensor.capture, tensor.slot
    return reference


def is_current_stream_capturing() -> bool:
    capture = DEVICE.capture
    return isinstance(capture, NpuCapture) and capture.stream is current_stream()


CONTENTS: dict[str, Any] = {
    "NPUGraph": NPUGraph,
    "graph": graph,
    "graph_pool_handle": Pool,
    "is_current_stream_capturing": is_current_stream_capturing,
}

"""Captured graphs, stored as lists of calls on CPU tensors, and the captures that record them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from card_emulator.card import DEVICE, GraphRecord
from card_emulator.counters import Tally
from card_emulator.ops import OpInfo
from card_emulator.source import Line, caller, describe
from card_emulator.tensor import DeviceTensor, Operation, real, written

# The counters to which every replay adds the values from the capture.
REPEATED = ("ops", "bytes_moved", "kv_bytes_read", "flops", "sorts", "sort_elements", "float64_ops", "collectives")


def count_replay(work: Tally, record: GraphRecord) -> None:
    """Count a replay of a graph. `work` contains the counters from its capture."""
    step = DEVICE.counters.step
    step.graph_replays += 1
    step.launches += 1
    for name in REPEATED:
        setattr(step, name, getattr(step, name) + getattr(work, name))
    record.replays += 1


def _find_dtype(args: Sequence[Any], results: Sequence[Any]) -> str:
    """Return the dtype of the first tensor in the operands and then the results that is not a boolean mask."""
    tensors = [item for item in tree_leaves((args, results)) if isinstance(item, DeviceTensor)]
    dtypes = [tensor.dtype for tensor in tensors]
    found = next((dtype for dtype in dtypes if dtype is not torch.bool), torch.bool)
    return str(found).removeprefix("torch.")


class Call(NamedTuple):
    run: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    holes: list[tuple[Any, Any, int]]
    """Tuples (container, key, slot): before the call, the tensor in `slot` is stored in `container[key]`."""
    outs: int | list[int]
    """The slots of the results. The slot is -1 if the result is an argument that was changed in place."""
    dead: list[int]
    """The slots to free after the call, because no later call reads them."""


class Program:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.lines: list[Line] = []
        self.num_slots = 0

    def run(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Run the calls and return the contents of all slots. Freed slots contain None."""
        slots: list[Any] = [None] * self.num_slots
        slots[: len(inputs)] = inputs
        number = 0
        try:
            for number, (call, args, kwargs, holes, outs, dead) in enumerate(self.calls):  # noqa: B007
                for box, key, slot in holes:
                    box[key] = slots[slot]
                result = call(*args, **kwargs)
                for box, key, _ in holes:
                    box[key] = None
                if isinstance(outs, int):
                    if outs >= 0:
                        slots[outs] = result
                else:
                    for slot, item in zip(outs, result, strict=True):
                        if slot >= 0:
                            slots[slot] = item
                for slot in dead:
                    slots[slot] = None
        except (RuntimeError, IndexError) as error:
            error.add_note(f"in the replay of a captured graph, call {number}, from {describe(self.lines[number])}")
            raise
        return slots


class Capture:
    """A graph capture in progress. It keeps references to the external tensors that the graph uses, such as weights."""

    what = "graph capture"
    """The name of this kind of capture in messages."""

    def __init__(self, name: str, track_results: bool = False) -> None:
        self.name = name
        self.program = Program()
        self.num_inputs = 0
        self.externals: dict[int, DeviceTensor] = {}
        self.made: list[weakref.ref[DeviceTensor]] | None = [] if track_results else None
        self.input_dtypes: list[torch.dtype] = []
        self.input_memory: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._own_memory: set[int] = set()

    def add_input(self, tensor: DeviceTensor) -> None:
        tensor.capture, tensor.slot = self, self.program.num_slots
        self.program.num_slots += 1
        self.num_inputs += 1
        self.input_dtypes.append(tensor.inner.dtype)
        self.input_memory.add(id(tensor.memory))

    def owns(self, tensor: DeviceTensor) -> bool:
        return tensor.capture is self

    def is_input(self, tensor: DeviceTensor) -> bool:
        return tensor.capture is self and tensor.slot < self.num_inputs

    def record(self, operation: Operation) -> None:
        info, run, args, kwargs, results, new, single = operation
        if info.computes(new):
            schema = info.func._schema
            overload = f".{schema.overload_name}" if schema.overload_name else ""
            DEVICE.operators.add((schema.name + overload, _find_dtype(args, results)))
        line = caller()
        if info.writes:
            for target in written(info, args, kwargs):
                self.check_write(target, info, line)
        outs: list[int] = []
        for item in results:
            if isinstance(item, DeviceTensor) and any(item is one for one in new):
                outs.append(self._new_slot(item, info))
            else:
                outs.append(-1)
        self._append(run, args, kwargs, outs[0] if single else outs, line)

    def record_kernel(self, run: Callable[..., Any], args: Sequence[Any]) -> None:
        """Record a call that changes its first argument and returns it."""
        self._append(run, args, {}, -1, caller())

    def _append(
        self, run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], outs: int | list[int], line: Line
    ) -> None:
        holes: list[tuple[Any, Any, int]] = []
        template: list[Any] = list(args)
        for key, value in enumerate(args):
            self._bind(template, key, value, holes)
        named = dict(kwargs)
        for name, value in kwargs.items():
            self._bind(named, name, value, holes)
        self.program.calls.append(Call(run, template, named, holes, outs, []))
        self.program.lines.append(line)

    def _bind(self, box: Any, key: Any, value: Any, holes: list[tuple[Any, Any, int]]) -> None:
        if isinstance(value, DeviceTensor):
            if self.owns(value):
                box[key] = None
                holes.append((box, key, value.slot))
            else:
                self.externals[id(value)] = value
                box[key] = real(value)
        elif isinstance(value, (list, tuple)):
            items = list(value)
            box[key] = items
            for position, item in enumerate(value):
                self._bind(items, position, item, holes)
        elif isinstance(value, torch.Tensor) and value.dim() == 0:
            box[key] = value.clone()  # the graph keeps the current value

    def _new_slot(self, tensor: DeviceTensor, info: OpInfo) -> int:
        slot = self.program.num_slots
        self.program.num_slots += 1
        tensor.capture, tensor.slot = self, slot
        owns_memory = not (tensor.part or info.view)
        self._sizes[slot] = tensor.memory.nbytes if owns_memory else 0
        if owns_memory:
            self._own_memory.add(id(tensor.memory))
        if self.made is not None:
            self.made.append(weakref.ref(tensor))
        return slot

    def check_write(self, target: DeviceTensor, info: OpInfo, line: Line) -> None:
        """Reject an operation that changes a tensor in place, if the card cannot record it."""

    def check_collective(self, name: str) -> None:
        """Reject a collective if the card cannot record it."""

    def mark_step(self) -> None:
        """Handle a call to `mark_step` during the capture."""

    def makes(self, memory: Any) -> bool:
        """Whether this memory was allocated during the capture."""
        return id(memory) in self._own_memory

    def read_inputs(self, outputs: set[int]) -> set[int]:
        """Return the slots of the inputs on which an output or an in-place change depends. A lazy graph contains only
        these inputs. Inputs that are merely returned unchanged are not included."""
        needed = {slot for slot in outputs if slot >= self.num_inputs}
        for call in reversed(self.program.calls):
            outs = {call.outs} if isinstance(call.outs, int) else set(call.outs)
            if -1 in outs or outs & needed:
                needed.update(slot for _, _, slot in call.holes)
        return {slot for slot in needed if slot < self.num_inputs}

    def finish(self, kept_slots: set[int]) -> tuple[Program, int]:
        """Free each slot after its last use unless it is in `kept_slots`, and return the program and its peak
        memory."""
        last: dict[int, int] = {}
        for number, call in enumerate(self.program.calls):
            for slot in (call.outs,) if isinstance(call.outs, int) else call.outs:
                last[slot] = number
            for _, _, slot in call.holes:
                last[slot] = number
        for slot, number in last.items():
            if slot >= self.num_inputs and slot not in kept_slots:
                self.program.calls[number].dead.append(slot)
        alive = peak = 0
        for call in self.program.calls:
            outs = (call.outs,) if isinstance(call.outs, int) else call.outs
            alive += sum(self._sizes.get(slot, 0) for slot in outs)
            peak = max(peak, alive)
            alive -= sum(self._sizes.get(slot, 0) for slot in call.dead)
        return self.program, peak

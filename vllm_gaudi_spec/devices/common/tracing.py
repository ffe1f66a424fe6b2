"""Records the operations of a function by running it once with fake tensors."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_gaudi_spec.devices.common.arguments import find_tensors


class NotCompilableError(RuntimeError):
    """Raised for an operation that cannot be compiled correctly. The message shows the source line."""


class Value(NamedTuple):
    """A placeholder for a tensor in the arguments of an operation."""

    number: int


class Operation(NamedTuple):
    target: Any
    args: Any
    kwargs: Mapping[str, Any]
    """The arguments and keyword arguments, with `Value`s in place of tensors."""
    form: Hashable
    """A description of the operation and its non-tensor arguments. Equal operations have equal descriptions."""
    inputs: tuple[int, ...]
    """The numbers of the input tensors, in order."""
    outputs: tuple[int, ...]
    """The numbers of the output tensors. An output that is an input modified in place has the input's number."""
    positions: tuple[int, ...] | None
    """The positions of the output tensors in the result, or None if the result is a single tensor."""
    source: str
    """The line that issued the operation, formatted as in a traceback."""


@dataclass
class Segment:
    operations: list[Operation] = field(default_factory=list)
    is_compiled: bool = True
    """False if the segment is a collective, which runs eagerly because compiled collectives compute wrong sums (quirk
    C23)."""


class Fakes:
    """The fake tensors in a trace, which are numbered in order of creation."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(static_shapes=True)
        self.values: list[torch.Tensor] = []
        self._get_number: dict[int, int] = {}

    def enter(self, tensor: torch.Tensor) -> FakeTensor:
        """Create a fake copy of a tensor. Tensors that share memory also share it in the trace."""
        fake = self.mode.from_tensor(tensor, static_shapes=True)
        self._add(fake)
        return fake

    def get_number(self, fake: torch.Tensor) -> int | None:
        return self._get_number.get(id(fake))

    def get_geometry(self, number: int) -> tuple[Hashable, int]:
        """Return a tensor's geometry (such as its shape and strides), and the ID of its memory."""
        fake = self.values[number]
        geometry = fake.dtype, fake.shape, fake.stride(), fake.storage_offset(), fake.device
        return geometry, fake.untyped_storage()._cdata

    def add_result(self, result: Any) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Number the tensors in an operation's result, and return their numbers and positions. The positions are None
        if the result is a single tensor."""
        if isinstance(result, torch.Tensor):
            return (self._add_new(result),), None
        items = result if isinstance(result, (list, tuple)) else ()
        found = {position: item for position, item in enumerate(items) if isinstance(item, torch.Tensor)}
        return tuple(map(self._add_new, found.values())), tuple(found)

    def _add_new(self, fake: torch.Tensor) -> int:
        number = self.get_number(fake)
        return self._add(fake) if number is None else number

    def _add(self, fake: torch.Tensor) -> int:
        self.values.append(fake)
        return self._get_number.setdefault(id(fake), len(self.values) - 1)


class Tracer(TorchDispatchMode):
    """Records the operations in a `with` block and runs them on fake tensors."""

    def __init__(self, rewrites: Mapping[Any, Callable[..., Any]], device_type: str) -> None:
        super().__init__()
        self._rewrites = rewrites
        self._device_type = device_type
        self.fakes = Fakes()
        self._numbers_outside: dict[int, int] = {}
        self.outside: dict[int, torch.Tensor] = {}
        """Maps numbers to the real tensors that the function uses without taking them as arguments, such as weights."""
        self.segments = [Segment()]

    def get_number(self, tensor: torch.Tensor) -> int:
        number = self.fakes.get_number(tensor)
        if number is not None:
            return number
        number = self._numbers_outside.get(id(tensor))
        if number is None:
            if isinstance(tensor, FakeTensor):
                raise NotCompilableError(f"a tensor kept from an earlier trace is used: {_find_source()}")
            self.fakes.enter(tensor)
            number = self._numbers_outside[id(tensor)] = len(self.fakes.values) - 1
            self.outside[number] = tensor
        return number

    def cut(self) -> None:
        if self.segments[-1].operations:
            self.segments.append(Segment())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # queries that compute nothing, such as one for a tensor's device
            if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
                return args[0].fake_device
            with self.fakes.mode:
                return func(*args, **kwargs)
        rewrite = self._rewrites.get(func)
        if rewrite is not None:
            with self:
                result = rewrite(*args, **kwargs)
            if result is not NotImplemented:
                return result
        is_collective = func.namespace == "c10d"
        if not is_collective and _can_decompose(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        note = _Note(self)
        noted_args = note.of(args)
        noted_kwargs = {name: note.of(value) for name, value in kwargs.items()} if kwargs else kwargs
        source = _find_source()
        form = (func, *note.form, *noted_kwargs)
        inputs = tuple(note.inputs)
        positions: tuple[int, ...] | None
        if is_collective:
            result = _fake_collective(func, args)
            outputs, positions = tuple(map(self.get_number, find_tensors(result))), ()
            self.cut()
            self.segments[-1].is_compiled = False
        else:
            for item in note.others:
                raise NotCompilableError(f"{func} takes a {type(item).__name__}, which a graph cannot hold: {source}")
            result = self._run_fake(func, noted_args, noted_kwargs, source)
            outputs, positions = self.fakes.add_result(result)
        self.segments[-1].operations.append(
            Operation(func, noted_args, noted_kwargs, form, inputs, outputs, positions, source)
        )
        if is_collective:
            self.cut()
        return result

    def _run_fake(self, func: Any, args: Any, kwargs: Any, source: str) -> Any:
        if func.namespace == "_c10d_functional":
            raise NotCompilableError(f"{func} is a functional collective, which cannot be compiled: {source}")
        values = self.fakes.values
        try:
            with self.fakes.mode:
                result = func(*fill_in(args, values), **fill_in(kwargs, values))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise NotCompilableError(
                f"{func} needs values, which do not exist in a compiled graph: {source}"
            ) from error
        if isinstance(result, (list, tuple)) and any(isinstance(item, (list, tuple)) for item in result):
            raise NotCompilableError(f"{func} returns nested lists: {source}")
        for tensor in find_tensors(result):
            if tensor.device.type != self._device_type:
                raise NotCompilableError(f"{func} makes a tensor on {tensor.device} in a compiled graph: {source}")
        return result


@functools.cache
def _can_decompose(func: Any) -> bool:
    return bool(func._can_decompose())


class _Note:
    """Describes an operation's arguments and replaces their tensors with placeholders."""

    def __init__(self, tracer: Tracer) -> None:
        self._get_number = tracer.get_number
        self.form: list[Hashable] = []
        """A description of the arguments in order, in which 0.0 differs from -0.0, 1 differs from True, and NaN equals
        NaN."""
        self.inputs: list[int] = []
        self.others: list[Any] = []
        """Arguments that cannot be stored in a graph."""

    def of(self, value: Any) -> Any:
        """Return `value` with `Value`s in place of tensors, and record the tensors and other arguments."""
        kind: Any = type(value)
        if kind in _PRINTABLE:
            self.form.append(value)
        elif isinstance(value, torch.Tensor):
            number = self._get_number(value)
            self.inputs.append(number)
            self.form.append(Value)
            return Value(number)
        elif isinstance(value, (list, tuple)):
            self.form.append((list if isinstance(value, list) else tuple, len(value)))
            items = [self.of(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        elif isinstance(value, float):
            self.form.append((float, value.hex()))
        elif isinstance(value, (int, str)):  # also booleans and enumerations
            self.form.append((kind, value))
        else:
            # Describe objects of the communication library only by type, because they differ between traces.
            self.form.append(kind)
            self.others.append(value)
        return value


def _fake_collective(func: Any, args: Any) -> Any:
    """Return a result like that of the collective: a handle to wait on, and for some collectives also the tensors that
    it modifies, which are its first argument."""
    work = FakeWork().boxed()
    return (args[0], work) if len(func._schema.returns) == 2 else work


# Types whose values can be compared with `==` to find out whether two operations are the same.
_PRINTABLE = frozenset({int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})

_emulator = find_spec("card_emulator")
# Files that are never reported as the source of an operation, such as those of torch and the emulator.
_SKIPPED = (
    os.path.dirname(torch.__file__) + os.sep,
    *([os.path.dirname(_emulator.origin) + os.sep] if _emulator is not None and _emulator.origin else []),
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "hpu", "compiled.py"),
    __file__,
    contextlib.__file__,
    functools.__file__,
)


def _find_source() -> str:
    """Return the source line that issued an operation: the innermost one outside the files in `_SKIPPED`."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    return f'File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}'


def fill_in(value: Any, by_number: Sequence[Any] | Mapping[int, Any]) -> Any:
    """Replace each `Value` in nested lists, tuples, and dicts with the item of `by_number` that has its number."""
    if isinstance(value, Value):
        return by_number[value.number]
    if isinstance(value, (list, tuple)):
        items = [fill_in(item, by_number) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {name: fill_in(item, by_number) for name, item in value.items()}
    return value


def check_equal(first: Tracer, second: Tracer) -> None:
    """Raise NotCompilableError if two traces of the same function differ."""
    identify = operator.attrgetter("form", "inputs", "outputs")
    operations, again = (
        [one for segment in tracer.segments for one in segment.operations] for tracer in (first, second)
    )
    for one, other in itertools.zip_longest(operations, again):
        if one is None or other is None or identify(one) != identify(other):
            found = other or one
            raise NotCompilableError(
                f"{found.target} or its non-tensor arguments differ between two traces: {found.source}"
            )

"""What a function does to tensors, as a list of operations: it runs once on tensors without values."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_gaudi_spec.devices.common.arguments import tensors_in
from vllm_gaudi_spec.devices.common.fakes import Fakes, Results


class NotCompilableError(RuntimeError):
    """What a function does cannot be compiled, or would be compiled as something else. Names the line."""


class Value(NamedTuple):
    """Stands for the value with this number."""

    number: int


class Operation(NamedTuple):
    target: Any
    args: Any
    kwargs: Mapping[str, Any]
    """Both with `Value`s instead of tensors."""
    form: Hashable
    """What it does, without saying to which tensors: equal for operations that do the same."""
    inputs: tuple[int, ...]
    """Numbers of the tensors that it takes, in order."""
    outputs: tuple[int, ...]
    """Of those that it returns, which may be some that it takes."""
    positions: tuple[int, ...] | None
    """Of those in what it returns; None where it returns one tensor."""
    source: str
    """The line it came from, as in a traceback."""


@dataclass
class Segment:
    operations: list[Operation] = field(default_factory=list)
    is_compiled: bool = True
    """False for a single collective, which runs as it is: compiled ones are known to add wrongly (lesson C23)."""


class ByNumber(Protocol):
    """A list or a mapping."""

    def __getitem__(self, number: int, /) -> Any: ...


class Tracer(TorchDispatchMode):
    """Notes operations, and runs them on tensors without values."""

    def __init__(
        self, rewrites: Mapping[Any, Callable[..., Any]], device_type: str, results: Results | None = None
    ) -> None:
        """`results`: of operations in earlier traces."""
        super().__init__()
        self._rewrites = rewrites
        self._device_type = device_type
        self.fakes = Fakes(results or Results())
        self._numbers_outside: dict[int, int] = {}
        self.outside: dict[int, torch.Tensor] = {}
        """By number, tensors that were neither passed nor made."""
        self.segments = [Segment()]

    def number_of(self, tensor: torch.Tensor) -> int:
        number = self.fakes.number_of(tensor)
        if number is not None:
            return number
        number = self._numbers_outside.get(id(tensor))
        if number is None:
            if isinstance(tensor, FakeTensor):
                raise NotCompilableError(f"a tensor that was kept from an earlier trace is used: {_source()}")
            self.fakes.enter(tensor)
            number = self._numbers_outside[id(tensor)] = len(self.fakes.values) - 1
            self.outside[number] = tensor
        return number

    def cut(self) -> None:
        if self.segments[-1].operations:
            self.segments.append(Segment())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks where a tensor is, and computes nothing
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
        source = _source()
        form = (func, *note.form, *noted_kwargs)
        inputs = tuple(note.inputs)
        positions: tuple[int, ...] | None
        if is_collective:
            result = _without_communication(func, args)
            outputs, positions = tuple(map(self.number_of, tensors_in(result))), ()
            self.cut()
            self.segments[-1].is_compiled = False
        else:
            for item in note.others:
                raise NotCompilableError(f"{func} takes a {type(item).__name__}, which no graph holds: {source}")
            result, outputs, positions = self.fakes.result(
                form if func.namespace == "aten" else None,
                inputs,
                partial(self._without_values, func, noted_args, noted_kwargs, source),
            )
        self.segments[-1].operations.append(
            Operation(func, noted_args, noted_kwargs, form, inputs, outputs, positions, source)
        )
        if is_collective:
            self.cut()
        return result

    def _without_values(self, func: Any, args: Any, kwargs: Any, source: str) -> Any:
        if func.namespace == "_c10d_functional":
            raise NotCompilableError(f"{func} is a collective that has no step of its own: {source}")
        values = self.fakes.values
        try:
            with self.fakes.mode:
                result = func(*fill_in(args, values), **fill_in(kwargs, values))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise NotCompilableError(f"{func} needs values, and a graph that is compiled has none: {source}") from error
        if isinstance(result, (list, tuple)) and any(isinstance(item, (list, tuple)) for item in result):
            raise NotCompilableError(f"{func} returns lists in lists: {source}")
        for tensor in tensors_in(result):
            if tensor.device.type != self._device_type:
                raise NotCompilableError(f"{func} makes a tensor on {tensor.device} in a compiled graph: {source}")
        return result


@functools.cache
def _can_decompose(func: Any) -> bool:
    return bool(func._can_decompose())


class _Note:
    """What an operation takes, taken apart: which tensors, and the rest."""

    def __init__(self, tracer: Tracer) -> None:
        self._number_of = tracer.number_of
        self.form: list[Hashable] = []
        """All that is no tensor, in order. Equal for equal ones: 0.0 and -0.0 are none, 1 and True are none, and NaN
        is NaN."""
        self.inputs: list[int] = []
        self.others: list[Any] = []
        """What no graph holds."""

    def of(self, value: Any) -> Any:
        """The same with `Value`s instead of tensors."""
        kind: Any = type(value)
        if kind in _PRINTABLE:
            self.form.append(value)
        elif isinstance(value, torch.Tensor):
            number = self._number_of(value)
            self.inputs.append(number)
            self.form.append(Value)
            return Value(number)
        elif isinstance(value, (list, tuple)):
            self.form.append((list if isinstance(value, list) else tuple, len(value)))
            items = [self.of(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        elif isinstance(value, float):
            self.form.append((float, value.hex()))
        elif isinstance(value, (int, str)):  # True, and numbers with names
            self.form.append((kind, value))
        else:
            # Objects of the communication library are others each time.
            self.form.append(kind)
            self.others.append(value)
        return value


def _without_communication(func: Any, args: Any) -> Any:
    """What a collective returns: the tensors that it changes, which come first, and something to wait for."""
    work = FakeWork().boxed()
    return (args[0], work) if len(func._schema.returns) == 2 else work


# What an argument of a graph may be, and equals nothing else.
_PRINTABLE = frozenset({int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})

_emulator = find_spec("card_emulator")
# Of the functions of torch, also of those that an emulated card replaces, the line is that of their caller.
_SKIPPED = (
    os.path.dirname(torch.__file__) + os.sep,
    *([os.path.dirname(_emulator.origin) + os.sep] if _emulator is not None and _emulator.origin else []),
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "hpu", "compiled.py"),
    __file__,
    contextlib.__file__,
    functools.__file__,
)


def _source() -> str:
    """The line that issued an operation: the innermost outside of torch and this file."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    return f'File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}'


def replace(value: Any, change: Callable[[Any], Any]) -> Any:
    """`change` of each item of nested lists, tuples and dicts."""
    if isinstance(value, Value):
        return change(value)
    if isinstance(value, (list, tuple)):
        items = [replace(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {name: replace(item, change) for name, item in value.items()}
    return change(value)


def fill_in(value: Any, by_number: ByNumber) -> Any:
    """`value` with what stands at each number instead of a `Value`."""
    return replace(value, lambda item: by_number[item.number] if isinstance(item, Value) else item)


def check_equal(first: Tracer, second: Tracer) -> None:
    """Two traces of one function."""
    operations, again = (
        [one for segment in tracer.segments for one in segment.operations] for tracer in (first, second)
    )
    for one, other in itertools.zip_longest(operations, again):
        if one is None or other is None or _does(one) != _does(other):
            found = other or one
            raise NotCompilableError(
                f"{found.target} is another operation each time, or has other numbers: {found.source}"
            )


def _does(operation: Operation) -> Hashable:
    return operation.form, operation.inputs, operation.outputs

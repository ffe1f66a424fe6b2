"""What a function does to tensors, as a list of operations: it runs once on tensors without values."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_gaudi_spec.devices.common.arguments import tensors_in


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
    outputs: tuple[int, ...]
    """Numbers of the tensors that it returns, which may be some that it was given."""
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

    def __init__(self, rewrites: Mapping[Any, Callable[..., Any]], device_type: str) -> None:
        super().__init__()
        self._rewrites = rewrites
        self._device_type = device_type
        self._fakes = FakeTensorMode(static_shapes=True)
        self.values: list[torch.Tensor] = []
        """Without values, by number."""
        self._number_of: dict[int, int] = {}
        self._numbers_outside: dict[int, int] = {}
        self.outside: dict[int, torch.Tensor] = {}
        """By number, tensors that were neither passed nor made."""
        self.segments = [Segment()]

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same without values."""
        fake = self._fakes.from_tensor(tensor, static_shapes=True)
        self._add(fake)
        return fake

    def number_of(self, tensor: torch.Tensor) -> int:
        number = self._number_of.get(id(tensor))
        if number is not None:
            return number
        number = self._numbers_outside.get(id(tensor))
        if number is None:
            if isinstance(tensor, FakeTensor):
                raise NotCompilableError(f"a tensor that was kept from an earlier trace is used: {_source()}")
            self.enter(tensor)
            number = self._numbers_outside[id(tensor)] = len(self.values) - 1
            self.outside[number] = tensor
        return number

    def cut(self) -> None:
        if self.segments[-1].operations:
            self.segments.append(Segment())

    def _add(self, fake: torch.Tensor) -> int:
        self.values.append(fake)
        return self._number_of.setdefault(id(fake), len(self.values) - 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks where a tensor is, and computes nothing
            with self._fakes:
                return func(*args, **kwargs)
        rewrite = self._rewrites.get(func)
        if rewrite is not None:
            with self:
                result = rewrite(*args, **kwargs)
            if result is not NotImplemented:
                return result
        is_collective = func.namespace == "c10d"
        if not is_collective and func._can_decompose():
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        source = _source()
        noted_args, noted_kwargs = replace(args, self._noted), replace(kwargs, self._noted)
        if is_collective:
            result = _without_communication(func, args)
        else:
            result = self._without_values(func, noted_args, noted_kwargs, source)
        found, positions = _outputs_of(func, result, source)
        outputs = tuple(self._number_of[id(item)] if id(item) in self._number_of else self._add(item) for item in found)
        operation = Operation(func, noted_args, noted_kwargs, outputs, positions, source)
        if is_collective:
            self.cut()
            self.segments[-1].is_compiled = False
        self.segments[-1].operations.append(operation)
        if is_collective:
            self.cut()
        return result

    def _without_values(self, func: Any, args: Any, kwargs: Any, source: str) -> Any:
        if func.namespace == "_c10d_functional":
            raise NotCompilableError(f"{func} is a collective that has no step of its own: {source}")
        for item in _items((args, kwargs)):
            if not isinstance(item, _PRINTABLE):
                raise NotCompilableError(f"{func} takes a {type(item).__name__}, which no graph holds: {source}")
        try:
            with self._fakes:
                result = func(*fill_in(args, self.values), **fill_in(kwargs, self.values))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise NotCompilableError(f"{func} needs values, and a graph that is compiled has none: {source}") from error
        for tensor in tensors_in(result):
            if tensor.device.type != self._device_type:
                raise NotCompilableError(f"{func} makes a tensor on {tensor.device} in a compiled graph: {source}")
        return result

    def _noted(self, item: Any) -> Any:
        return Value(self.number_of(item)) if isinstance(item, torch.Tensor) else item


def _without_communication(func: Any, args: Any) -> Any:
    """What a collective returns: the tensors that it changes, which come first, and something to wait for."""
    work = FakeWork().boxed()
    return (args[0], work) if len(func._schema.returns) == 2 else work


# What an argument of a graph may be besides a tensor.
_PRINTABLE = (Value, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

# Of the functions of torch, also of those that an emulated card replaces, the line is that of their caller.
_SKIPPED = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "emulator") + os.sep,
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


def _outputs_of(func: Any, result: Any, source: str) -> tuple[list[torch.Tensor], tuple[int, ...] | None]:
    """The tensors, and their positions where there may be several."""
    if isinstance(result, torch.Tensor):
        return [result], None
    if func.namespace == "c10d":
        return list(tensors_in(result)), ()
    items = result if isinstance(result, (list, tuple)) else ()
    if any(isinstance(item, (list, tuple)) for item in items):
        raise NotCompilableError(f"{func} returns lists in lists: {source}")
    found = {position: item for position, item in enumerate(items) if isinstance(item, torch.Tensor)}
    return list(found.values()), tuple(found)


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)) and not isinstance(value, Value):
        for item in value:
            yield from _items(item)
    elif isinstance(value, dict):
        yield from _items(list(value.values()))
    else:
        yield value


def numbers_in(value: Any) -> Iterator[int]:
    return (item.number for item in _items(value) if isinstance(item, Value))


def check_equal(first: Tracer, second: Tracer) -> None:
    """Two traces of one function."""
    operations, again = (
        [one for segment in tracer.segments for one in segment.operations] for tracer in (first, second)
    )
    for one, other in itertools.zip_longest(operations, again):
        if one is None or other is None or _plain(one) != _plain(other):
            found = other or one
            raise NotCompilableError(
                f"{found.target} is another operation each time, or has other numbers: {found.source}"
            )


def _plain(operation: Operation) -> Hashable:
    """What it does. Objects of the communication library are others each time."""
    arguments = replace(
        (operation.args, dict(operation.kwargs)),
        lambda item: torch.ScriptObject if isinstance(item, torch.ScriptObject) else constant(item),
    )
    return operation.target, frozen(arguments), operation.outputs


def constant(item: Any) -> Hashable:
    """Equal for equal ones: 0.0 and -0.0 are none, 1 and True are none, and NaN is NaN."""
    return type(item), item.hex() if isinstance(item, float) else item


def frozen(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return (type(value), *[frozen(item) for item in value])
    if isinstance(value, dict):
        return tuple((name, frozen(item)) for name, item in value.items())
    return value

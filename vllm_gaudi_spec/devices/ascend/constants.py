"""Computes tensors that follow from numbers alone once, instead of in each replay of each graph.

On an NPU the Python number in `torch.where(mask, x, 0)` or `x >> 16` is a tensor that an operation of the graph fills,
or copies from the host; so is each `arange` and what is computed from it. A function runs twice when its graph is made.
The first run finds such constants among its tensors and keeps them; the second run, which is captured, uses the kept
ones. A tensor that the function writes to is no constant.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

_RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_SHIFTS = {aten.__rshift__.Scalar: aten.__rshift__.Tensor, aten.__lshift__.Scalar: aten.__lshift__.Tensor}
# These return memory for the caller to fill.
_FOR_WRITING = ("empty", "zeros", "ones", "full", "new_", "rand", "clone", "copy")
_LARGEST = 1 << 20
"""Most numbers of a tensor that is kept."""


class Constants:
    """The constants of all graphs of a process."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, torch.Tensor] = {}
        self._spoiled: set[Hashable] = set()
        """Constants that are written to by the function whose graph is being made."""

    @contextmanager
    def finding(self) -> Iterator[None]:
        """Return the context of a function's first run."""
        run = _Finding(self._kept)
        with run:
            yield
        self._spoiled = run.spoiled
        for key, tensor in run.found.items():
            if key not in run.spoiled and tensor.numel() <= _LARGEST:
                self._kept.setdefault(key, tensor)

    @contextmanager
    def using(self) -> Iterator[None]:
        """Return the context of its second run."""
        with _Using(self._kept, self._spoiled):
            yield

    def __len__(self) -> int:
        return len(self._kept)


class _Run(TorchDispatchMode):
    """A run of a function, in which each constant has a key that describes how it follows from numbers."""

    def __init__(self, constants: dict[Hashable, torch.Tensor]) -> None:
        super().__init__()
        self.constants = constants
        self.memory: dict[Hashable, Hashable] = {}
        """The tensor whose memory a constant has; for a view, the one that it views."""
        self._tensors: dict[int, tuple[Hashable, torch.Tensor]] = {}
        """By ids, which are not reused as long as the tensors are here."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        func, args = self._with_tensors(func, args)
        key = self._key(func, args, kwargs)
        if key is None:
            if func._schema.is_mutable:
                self._write(func, args, kwargs)
            return func(*args, **kwargs)
        is_view = func._schema.returns[0].alias_info is not None
        self.memory[key] = self.memory[self._key_of(args[0])] if is_view else key
        tensor = self.constant(key, func, args, kwargs)
        self._tensors[id(tensor)] = key, tensor
        return tensor

    def constant(self, key: Hashable, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        tensor: torch.Tensor = func(*args, **kwargs)
        return tensor

    def number(self, key: Hashable, number: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a number as a tensor without dimensions, which nothing else refers to or writes to."""
        return torch.full((), number, dtype=dtype, device=device)

    def written(self, key: Hashable) -> None:
        """Mark a constant that the function writes to."""

    def _key_of(self, tensor: torch.Tensor) -> Hashable | None:
        return self._tensors[id(tensor)][0] if id(tensor) in self._tensors else None

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
        """Return the key of an operation's result; None if it is no constant."""
        if func not in _RANGES:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            if not tensors or any(id(tensor) not in self._tensors for tensor in tensors) or not _is_pure(func):
                return None
        rest = (*(arg for arg in args if not isinstance(arg, torch.Tensor)), *kwargs.values())
        if not all(isinstance(value, _PLAIN) for value in _flat(rest)):
            return None
        named = tuple([(name, _make_hashable(value)) for name, value in sorted(kwargs.items())])
        return (
            func,
            tuple([self._key_of(arg) if isinstance(arg, torch.Tensor) else _make_hashable(arg) for arg in args]),
            named,
        )

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Mark everything with this memory, and what is computed from it from here on, as no constant."""
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            for tensor in _flat(value):
                key = self._key_of(tensor) if isinstance(tensor, torch.Tensor) else None
                if key is not None:
                    self._forget(self.memory[key])

    def _forget(self, memory: Hashable) -> None:
        for key, its in self.memory.items():
            if its == memory:
                self.written(key)
        found = self._tensors.items()
        self._tensors = {number: (key, tensor) for number, (key, tensor) in found if self.memory[key] != memory}

    def _with_tensors(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Run the operation with tensors in place of numbers that an NPU would convert to tensors."""
        if func in _SHIFTS:
            x, bits = args
            return _SHIFTS[func], (x, self._number(bits, x.dtype, x.device))
        if func is aten.where.ScalarOther:
            mask, x, number = args
            return aten.where.self, (mask, x, self._number(number, torch.result_type(x, number), mask.device))
        if func is aten.where.ScalarSelf:
            mask, number, x = args
            return aten.where.self, (mask, self._number(number, torch.result_type(x, number), mask.device), x)
        if func is aten.where.Scalar:
            mask, *numbers = args
            dtype = torch.result_type(*numbers)
            return aten.where.self, (mask, *(self._number(number, dtype, mask.device) for number in numbers))
        return func, args

    def _number(self, number: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        key = _make_hashable(number), dtype, device
        return self.constants[key] if key in self.constants else self.number(key, number, dtype, device)


class _Finding(_Run):
    """Makes every tensor, and records those that are constants."""

    def __init__(self, constants: dict[Hashable, torch.Tensor]) -> None:
        super().__init__(constants)
        self.found: dict[Hashable, torch.Tensor] = {}
        self.spoiled: set[Hashable] = set()

    def constant(self, key: Hashable, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        self.found[key] = super().constant(key, func, args, kwargs)
        return self.found[key]

    def number(self, key: Hashable, number: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.constants[key] = super().number(key, number, dtype, device)
        return self.constants[key]

    def written(self, key: Hashable) -> None:
        self.spoiled.add(key)


class _Using(_Run):
    """Uses the constants that were kept."""

    def __init__(self, constants: dict[Hashable, torch.Tensor], spoiled: set[Hashable]) -> None:
        super().__init__(constants)
        self._spoiled = spoiled

    def constant(self, key: Hashable, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if key in self.constants and key not in self._spoiled:
            return self.constants[key]
        return super().constant(key, func, args, kwargs)


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


def _is_pure(func: Any) -> bool:
    """Whether an operation returns one tensor that follows from its arguments and is not for the caller to fill."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    return (
        func.namespace == "aten"
        and not schema.is_mutable
        and len(schema.returns) == 1
        and str(schema.returns[0].type) == "Tensor"
        and torch.Tag.nondeterministic_seeded not in func.tags
        and not name.startswith(_FOR_WRITING)
        and not name.endswith("_like")
    )


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _make_hashable(value: Any) -> Hashable:
    """Convert an argument so that 1, 1.0 and True differ, as do 0.0 and -0.0, and NaN equals NaN."""
    if isinstance(value, list | tuple):
        return tuple(map(_make_hashable, value))
    return (type(value), repr(value)) if isinstance(value, int | float) else value

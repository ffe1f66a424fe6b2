"""Splits function arguments into tensors and a hashable remainder, from which graphs derive their keys."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch


class _Tensor(NamedTuple):
    """A placeholder for the tensor at an index in the list of tensors."""

    tensor_index: int


class _Tuple(NamedTuple):
    make: Callable[..., Any]
    items: tuple[Hashable, ...]


class _Number(NamedTuple):
    """A bool or float. It needs a key of its own, because it may compare equal to an int."""

    kind: type
    value: Any


_PLAIN = frozenset({int, str, type(None)})


def flatten(value: Any) -> tuple[list[torch.Tensor], Hashable]:
    """Split a tensor, number, string, None, or a tuple of these into tensors and a hashable remainder."""
    tensors: list[torch.Tensor] = []

    def walk(part: Any) -> Hashable:
        if type(part) in _PLAIN:  # check common types first, because isinstance is slower
            return part
        if isinstance(part, torch.Tensor):
            tensors.append(part)
            return _Tensor(len(tensors) - 1)
        if isinstance(part, bool):
            return _Number(bool, part)
        if isinstance(part, float):
            return _Number(float, part.hex())  # as text, because -0.0 equals 0.0 and NaN does not equal NaN
        if isinstance(part, tuple):
            return _Tuple(type(part), tuple(walk(item) for item in part))
        hash(part)  # raise an error for unhashable arguments, which cannot be part of a key
        return part

    return tensors, walk(value)


def find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in an operator's arguments or results, including those nested in lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from find_tensors(item)


def rebuild(tensors: list[torch.Tensor], rest: Any) -> Any:
    if isinstance(rest, _Tensor):
        return tensors[rest.tensor_index]
    if isinstance(rest, _Number):
        return float.fromhex(rest.value) if rest.kind is float else rest.value
    if isinstance(rest, _Tuple):
        items = [rebuild(tensors, item) for item in rest.items]
        return rest.make(*items) if hasattr(rest.make, "_fields") else tuple(items)
    return rest


def make_key(tensors: Sequence[torch.Tensor], rest: Hashable) -> Hashable:
    """Return the key of a graph. It is more precise than the key in Intel's bridge, which ignores dtypes and does not
    distinguish -1 from -2."""
    return (rest, *[(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in tensors])


def get_name(function: Any) -> str:
    """Return the name of a function or `partial` for use in reports."""
    return str(getattr(function, "__qualname__", "") or function.func.__qualname__)

"""A function's arguments as a list of tensors and a hashable rest: the key of a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch


class _Tensor(NamedTuple):
    """Stands for the tensor at an index of the list."""

    tensor_index: int


class _Tuple(NamedTuple):
    make: Callable[..., Any]
    items: tuple[Hashable, ...]


class _Number(NamedTuple):
    """One that equals an int, and is none."""

    kind: type
    value: Any


_PLAIN = frozenset({int, str, type(None)})


def flatten(value: Any) -> tuple[list[torch.Tensor], Hashable]:
    """`value` is a tensor, a number, a text, None, or a tuple of those, named or not."""
    tensors: list[torch.Tensor] = []

    def walk(part: Any) -> Hashable:
        if type(part) in _PLAIN:  # most parts are, and to ask for a tensor takes longer
            return part
        if isinstance(part, torch.Tensor):
            tensors.append(part)
            return _Tensor(len(tensors) - 1)
        if isinstance(part, bool):
            return _Number(bool, part)
        if isinstance(part, float):
            return _Number(float, part.hex())  # -0.0 equals 0.0, and NaN no NaN
        if isinstance(part, tuple):
            return _Tuple(type(part), tuple(walk(item) for item in part))
        hash(part)  # what has none would make a graph at every call
        return part

    return tensors, walk(value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Of what an operation takes or returns: tensors, and lists of them among other things."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def rebuild(tensors: list[torch.Tensor], rest: Any) -> Any:
    if isinstance(rest, _Tensor):
        return tensors[rest.tensor_index]
    if isinstance(rest, _Number):
        return float.fromhex(rest.value) if rest.kind is float else rest.value
    if isinstance(rest, _Tuple):
        items = [rebuild(tensors, item) for item in rest.items]
        return rest.make(*items) if hasattr(rest.make, "_fields") else tuple(items)
    return rest


def key_of(tensors: Sequence[torch.Tensor], rest: Hashable) -> Hashable:
    """What a graph is made for. The bridge's own key is a hash without dtypes, to which -1 and -2 are one."""
    return (rest, *[(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in tensors])


def name_of(function: Any) -> str:
    """What a function, or a part-application of one, is called in reports."""
    return str(getattr(function, "__qualname__", "") or function.func.__qualname__)

"""Compiled mode, in which `hpu_backend` compiles steps. Operations that it cannot compile correctly are rewritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from vllm_gaudi_spec.devices.common.regions import RegionCompiler

aten = torch.ops.aten


def make_region_compiler() -> RegionCompiler:
    return RegionCompiler(_compile, "hpu", _REWRITES)


def _compile(module: fx.GraphModule, examples: list[torch.Tensor]) -> Any:
    from torch._dynamo import lookup_backend  # imported here because it takes a second and lazy mode does not need it

    return lookup_backend("hpu_backend")(module, examples)


def _integer_where(condition: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> Any:
    """Rewrite `where` on integers, which would be compiled incorrectly (quirk C17)."""
    if any(value.is_floating_point() or value.dtype is torch.bool for value in (left, right)):
        return NotImplemented
    kind = torch.result_type(left, right)
    left, right = left.to(kind), right.to(kind)
    return right + (left - right) * condition.to(kind)


def _product(left: torch.Tensor, right: Any) -> Any:
    """Rewrite multiplication by booleans, which would split the graph (quirk C16)."""
    return left * int(right) if isinstance(right, bool) and left.dtype is not torch.bool else NotImplemented


def _booleans(make: Any) -> Callable[..., Any]:
    """Rewrite an operation that fills a tensor with booleans, which would split the graph (quirk C16)."""

    def rewrite(*args: Any, **kwargs: Any) -> Any:
        like = args[0].dtype if isinstance(args[0], torch.Tensor) else None
        filler = torch.bool if isinstance(args[-1], bool) else None
        if (kwargs.get("dtype") or like or filler) is not torch.bool:
            return NotImplemented
        numbers = [int(item) if isinstance(item, bool) else item for item in args]
        return make(*numbers, **{**kwargs, "dtype": torch.int32}).ne(0)

    return rewrite


def _rows(tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> Any:
    """Rewrite indexing along one dimension, which would split the graph (quirk C16)."""
    indexed = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(indexed) != 1 or indexed[0][1].dtype in (torch.bool, torch.uint8) or not indexed[0][1].dim():
        return NotImplemented
    ((dim, index),) = indexed
    from_start = index + (index < 0).to(index.dtype) * tensor.shape[dim]
    return tensor.index_select(dim, from_start.flatten()).unflatten(dim, index.shape)


_FILLING = [
    getattr(aten, name).default
    for value in ("full", "zeros", "ones")
    for name in (value, f"{value}_like", f"new_{value}")
]
_REWRITES: dict[Any, Callable[..., Any]] = {
    aten.where.self: _integer_where,
    aten.mul.Tensor: _product,
    aten.index.Tensor: _rows,
    **{make: _booleans(make) for make in _FILLING},
}

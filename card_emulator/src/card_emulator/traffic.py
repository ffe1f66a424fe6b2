"""The bytes of device memory that an operation reads and writes, computed from plain CPU (or meta) tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def distinct_elements(tensor: torch.Tensor) -> int:
    """Return the number of elements that the tensor occupies in memory. Elements that several indices share, as in
    expanded tensors and overlapping windows, are counted once."""
    numel = tensor.numel()
    if numel == 0 or tensor.is_contiguous():
        return numel
    alone = extent = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            alone *= size
            extent += (size - 1) * stride
    return min(alone, extent)


def distinct_bytes(tensor: torch.Tensor) -> int:
    return distinct_elements(tensor) * tensor.element_size()


def read_bytes(packet: str, position: int, args: Sequence[Any], kwargs: dict[str, Any], operand: torch.Tensor) -> int:
    """Return the number of bytes that an operation reads from an operand: all of it, unless `READS` says otherwise."""
    part = READS.get(packet)
    nbytes = part(position, args, kwargs) if part is not None else None
    return distinct_bytes(operand) if nbytes is None else nbytes


def gathered_bytes(table: torch.Tensor, made: int) -> int:
    """Return the number of bytes that a gather reads from `table`. This is `made`, the size of its result, except that
    expanded dimensions are read only once."""
    numel = table.numel()
    return made * distinct_elements(table) // numel if numel else 0


def changed_bytes(packet: str, overload: str, args: Sequence[Any], target: torch.Tensor) -> tuple[int, int]:
    """Return how many bytes of its target an in-place operation reads, and how many it writes."""
    elements = distinct_elements(target)
    read = packet not in _OVERWRITES and overload != "out" and not overload.endswith("_out")
    touched = TOUCHED.get(packet)
    if touched is not None and read:
        # An element that the index contains several times is counted only once.
        elements = min(elements, touched(args))
        read = packet in _ACCUMULATES or "reduce" in overload or _accumulates(packet, args)
    nbytes = elements * target.element_size()
    return nbytes if read else 0, nbytes


def _accumulates(packet: str, args: Sequence[Any]) -> bool:
    return packet in ("index_put_", "put_") and len(args) > 3 and bool(args[3])


def _put(args: Sequence[Any]) -> int:
    """Return the number of elements that index_put_ writes. For a mask, this is an upper bound: all elements."""
    tensor, indices = args[0], args[1]
    index_tensors = [index for index in indices if index is not None]
    numel: int = tensor.numel()
    if any(index.dtype in (torch.bool, torch.uint8) for index in index_tensors):
        return numel
    num_elements = torch.broadcast_shapes(*(index.shape for index in index_tensors)).numel()
    for dim, size in enumerate(tensor.shape):
        if dim >= len(indices) or indices[dim] is None:
            num_elements *= size
    return num_elements


def _filled(args: Sequence[Any]) -> int:
    tensor, dim, index = args[:3]
    count: int = index.numel()
    if tensor.dim() and count:
        count *= tensor.numel() // max(tensor.shape[dim], 1)
    return count


def _numel(position: int) -> Callable[[Sequence[Any]], int]:
    return lambda args: int(args[position].numel())


_OVERWRITES = frozenset(
    (
        *("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "uniform_", "normal_", "random_"),
        *("exponential_", "bernoulli_", "geometric_", "cauchy_", "log_normal_"),
    )
)
# Maps a packet to a function of an operand's position and the arguments. The function returns the number of bytes that
# are read from the operand, or None if all of it is read.
READS: dict[str, Callable[[int, Sequence[Any], dict[str, Any]], int | None]] = {}
# Maps the packet of an indexed update to a function of its arguments that returns the number of elements written.
TOUCHED: dict[str, Callable[[Sequence[Any]], int]] = {
    **dict.fromkeys(("index_copy_", "index_add_", "index_reduce_"), _numel(3)),
    **dict.fromkeys(("scatter_", "scatter_add_", "scatter_reduce_"), _numel(2)),
    "index_fill_": _filled,
    "index_put_": _put,
    "put_": _numel(1),
}
_ACCUMULATES = frozenset(("index_add_", "index_reduce_", "scatter_add_", "scatter_reduce_"))

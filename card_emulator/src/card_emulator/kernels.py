"""Kernels for operations whose results on the device differ from torch's on a CPU. They take CPU or meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from card_emulator.card import DEVICE

aten = torch.ops.aten


def checked(index: torch.Tensor, size: int, what: str) -> torch.Tensor:
    """Check that the index is within the dimension, and return it. Negative values are rejected, or are converted to
    positions from the start if the card accepts them. Real cards are not known to check for out-of-range indices."""
    if index.is_meta or index.numel() == 0:
        return index
    low, high = index.aminmax()
    if -size <= low < 0 and high < size and DEVICE.model.counts_from_the_end:
        DEVICE.counters.step.negative_indices += 1
        DEVICE.counters.event("negative index", what)
        return index.where(index >= 0, index + size)
    if low < 0 or high >= size:
        wrong = int(low) if low < 0 else int(high)
        hint = DEVICE.model.negative_index if wrong < 0 else "the device does not check"
        raise IndexError(f"{what}: index {wrong} is out of range for a dimension of size {size}; {hint}")
    return index


def _index(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    return aten.index.Tensor(tensor, _checked_all(tensor, indices, "index"))


def _index_put(
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:
    return aten.index_put.default(tensor, _checked_all(tensor, indices, "index_put"), values, accumulate)


def _index_put_(
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:
    return aten.index_put_.default(tensor, _checked_all(tensor, indices, "index_put_"), values, accumulate)


def _checked_all(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], what: str) -> list[torch.Tensor | None]:
    return [
        index if index is None or index.dtype in (torch.bool, torch.uint8) else checked(index, tensor.shape[dim], what)
        for dim, index in enumerate(indices)
    ]


def _along(func: Any, what: str) -> Callable[..., torch.Tensor]:
    """Return a kernel whose arguments begin with (tensor, dim, index)."""

    def run(tensor: torch.Tensor, dim: int, index: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.dim():
            index = checked(index, tensor.shape[dim], what)
        return func(tensor, dim, index, *args, **kwargs)

    return run


def _rows_of_bytes(name: str) -> Callable[..., torch.Tensor]:
    """Return a kernel that can also copy FP8 rows, which torch cannot do on a CPU. A card can: vllm-gaudi writes its
    FP8 cache in this way (extension/utils.py)."""
    copy = _along(getattr(aten, name).default, name)

    def run(tensor: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not torch.float8_e4m3fn:
            return copy(tensor, dim, index, source)
        if source.dtype is not tensor.dtype:
            raise RuntimeError(f"{name}: the tensor is {tensor.dtype} and its source {source.dtype}")
        copied = copy(tensor.view(torch.uint8), dim, index, source.view(torch.uint8))
        return tensor if name.endswith("_") else copied.view(tensor.dtype)

    return run


def _flat(func: Any, what: str) -> Callable[..., torch.Tensor]:
    """Return a kernel whose arguments begin with (tensor, index), where the index refers to the flattened tensor."""

    def run(tensor: torch.Tensor, index: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        index = checked(index, tensor.numel(), what)
        return func(tensor, index, *args, **kwargs)

    return run


def _embedding(weight: torch.Tensor, indices: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    indices = checked(indices, weight.shape[0], "embedding")
    return aten.embedding.default(weight, indices, *args, **kwargs)


def one_hot(classes: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return one-hot vectors. The vector for class -1 is all zeros, whereas torch would raise an error."""
    return (classes.unsqueeze(-1) == torch.arange(num_classes, device=classes.device)).to(torch.int64)


def _log1p(tensor: torch.Tensor) -> torch.Tensor:
    """Compute log(1 + x). A hostile card first rounds 1 + x, which loses precision near zero, because the precision of
    real cards is not published."""
    if not DEVICE.hostile:
        return aten.log1p.default(tensor)
    return (tensor.float() + 1).log_().to(tensor.dtype)


def _log1p_(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.copy_(_log1p(tensor))


def to_e4m3(tensor: torch.Tensor, limit: float) -> torch.Tensor:
    """Convert to e4m3 like the device, which clamps values to `limit`. Torch returns NaN for values above 448."""
    return tensor.clamp(-limit, limit).to(torch.float8_e4m3fn)


def as_read(e4m3: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the values as the device reads them: bytes that represent values above `limit` are NaN."""
    if not DEVICE.hostile or limit == torch.finfo(torch.float8_e4m3fn).max:
        return e4m3
    past = e4m3.float().abs() > limit
    return e4m3.view(torch.uint8).masked_fill(past, 0x7F).view(torch.float8_e4m3fn)


def through_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Round a float64 result to the device's precision without changing its dtype."""
    return tensor.copy_(tensor.float())


KERNELS: dict[str, Callable[..., Any]] = {
    "index.Tensor": _index,
    "index_put.default": _index_put,
    "index_put_.default": _index_put_,
    "embedding.default": _embedding,
    "log1p.default": _log1p,
    "log1p_.default": _log1p_,
    **{
        f"{name}.{overload}": _along(getattr(getattr(aten, name), overload), name)
        for name, overload in (
            ("index_select", "default"),
            ("index_select", "out"),
            ("gather", "default"),
            ("gather", "out"),
            ("index_add", "default"),
            ("index_add_", "default"),
            ("index_reduce", "default"),
            ("index_reduce_", "default"),
            ("index_fill", "int_Scalar"),
            ("index_fill", "int_Tensor"),
            ("index_fill_", "int_Scalar"),
            ("index_fill_", "int_Tensor"),
            ("scatter", "src"),
            ("scatter", "value"),
            ("scatter", "reduce"),
            ("scatter", "value_reduce"),
            ("scatter_", "src"),
            ("scatter_", "value"),
            ("scatter_", "reduce"),
            ("scatter_", "value_reduce"),
            ("scatter_add", "default"),
            ("scatter_add_", "default"),
            ("scatter_reduce", "two"),
            ("scatter_reduce_", "two"),
        )
    },
    **{f"{name}.default": _rows_of_bytes(name) for name in ("index_copy", "index_copy_")},
    **{f"{name}.default": _flat(getattr(aten, name).default, name) for name in ("take", "put", "put_")},
}

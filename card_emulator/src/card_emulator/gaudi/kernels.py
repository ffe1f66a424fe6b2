"""Operations that a Gaudi supports only with certain arguments, or whose results differ from torch's on a CPU.

The rules come from the bridge's published source (v1.19) unless another source is given. Numbers such as O03 refer to
rows in docs/contributing/quirks.md. A kind card has none of these quirks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from card_emulator import kernels
from card_emulator.card import DEVICE, DeviceRefusal
from card_emulator.source import here

aten = torch.ops.aten
Kernel = Callable[..., Any]

_MOST_DIMS = 5


def _refuse(what: str) -> None:
    raise DeviceRefusal(f"{what}, at {here()}")


# --- arguments without a kernel: the operation runs on the host, or ends the process during a capture ---


def _index_reduce(usual: Kernel) -> Kernel:
    def run(tensor: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *args: Any, **kw: Any) -> Any:
        reduce = args[0] if args else kw["reduce"]
        if reduce != "amax" or dim % max(tensor.dim(), 1) != 0 or kw.get("include_self") is False:  # O03
            DEVICE.fallback(f"aten.index_reduce of {reduce} along dimension {dim}")
        elif tensor.dim() > 1 and tensor.shape[-1] == 1:  # O04: vllm-hpu-extension 76f63d9 squeezes such tensors first
            _refuse("aten.index_reduce with a last dimension of 1")
        return usual(tensor, dim, index, source, *args, **kw)

    return run


def _index_select(usual: Kernel) -> Kernel:
    def run(tensor: torch.Tensor, dim: int, index: torch.Tensor, *args: Any, **kw: Any) -> Any:
        if tensor.dim() > _MOST_DIMS:  # O05, L27
            DEVICE.fallback(f"aten.index_select of {tensor.dim()} dimensions")
        return usual(tensor, dim, index, *args, **kw)

    return run


def _sort(usual: Kernel) -> Kernel:
    def run(tensor: torch.Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
        if stable and (dim % max(tensor.dim(), 1) == 0 or tensor.shape[dim] <= 37):  # O07
            DEVICE.fallback(f"a stable aten.sort along dimension {dim} of {tuple(tensor.shape)}")
        return usual(tensor, stable=stable, dim=dim, descending=descending)

    return run


# --- arguments that fail ---


def _where(usual: Kernel) -> Kernel:
    def run(condition: torch.Tensor, *args: Any) -> Any:
        if condition.dtype is not torch.bool:  # O06
            _refuse(f"aten.where with a {condition.dtype} condition; only boolean conditions have a kernel")
        return usual(condition, *args)

    return run


def _topk(usual: Kernel) -> Kernel:
    def run(tensor: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        if not sorted and largest:  # O08
            _refuse("aten.topk: unsorted output not supported")
        return usual(tensor, k, dim, largest, sorted)

    return run


def _gather(usual: Kernel) -> Kernel:
    def run(tensor: torch.Tensor, *args: Any, **kw: Any) -> Any:
        if tensor.dtype is torch.int64:  # O38: transformers, issue 39175
            _refuse("aten.gather of int64 values")
        return usual(tensor, *args, **kw)

    return run


def _matmul(usual: Kernel) -> Kernel:
    def run(left: torch.Tensor, right: torch.Tensor) -> Any:
        num_dims = max(left.dim(), right.dim())
        if num_dims > _MOST_DIMS:  # L27: the graph compiler's batch_gemm does not support more
            _refuse(f"aten.matmul of {num_dims} dimensions")
        return usual(left, right)

    return run


def _multinomial(usual: Kernel) -> Kernel:
    def run(probs: torch.Tensor, *args: Any, **kw: Any) -> Any:
        if probs.dtype is torch.bfloat16:  # O20: optimum-habana, pull request 1644
            _refuse("aten.multinomial of bfloat16 probabilities, which samples inaccurately")
        return usual(probs, *args, **kw)

    return run


# --- arguments with different results ---


def _shares_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    return not left.is_meta and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def _index_copy(usual: Kernel) -> Kernel:
    """Copy rows in a different order than torch. If several source rows have the same target row, a Gaudi may write any
    of them last; this kernel writes the first one last (O13). A source inside the tensor being written is rejected,
    because a Gaudi may overwrite the source before reading it (O14: vllm-gaudi, pull request 329)."""

    def run(tensor: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Any:
        if tensor.dim() and _shares_memory(tensor, source):
            _refuse("aten.index_copy whose source is a part of the tensor itself")
        if not index.dim() or not source.dim():
            return usual(tensor, dim, index, source)
        return usual(tensor, dim, index.flip(0), source.flip(dim))

    return run


def _index_put(usual: Kernel) -> Kernel:
    def run(tensor: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, accumulate: bool = False) -> Any:
        only = indices[0] if len(indices) == 1 else None
        if only is None or only.dtype is torch.bool or only.dim() != 1:
            return usual(tensor, indices, values, accumulate)
        if only.numel() > tensor.shape[0]:  # O12: vllm-hpu-extension 940fdb7
            _refuse("aten.index_put with more indices than rows: Invalid inputs for scatter_nd_onnx")
        if values.dim() == tensor.dim() and values.shape[0] == only.numel():  # O13
            return usual(tensor, [only.flip(0)], values.flip(0), accumulate)
        return usual(tensor, indices, values, accumulate)

    return run


def _scatter(usual: Kernel) -> Kernel:
    """Scatter values in a different order than torch (O13, O33). A source inside the tensor being written is rejected
    (O38)."""

    def run(tensor: torch.Tensor, dim: int, index: torch.Tensor, source: Any, *args: Any, **kw: Any) -> Any:
        if not isinstance(source, torch.Tensor) or not index.dim():
            return usual(tensor, dim, index, source, *args, **kw)
        if _shares_memory(tensor, source):
            _refuse("aten.scatter whose source is a part of the tensor itself")
        part = source[tuple(slice(size) for size in index.shape)]
        return usual(tensor, dim, index.flip(dim), part.flip(dim), *args, **kw)

    return run


def _argmax(usual: Kernel) -> Kernel:
    """Return the last index if there are several equal maxima (O09). A CPU returns the first."""

    def run(tensor: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None or not tensor.dim():
            return usual(tensor, dim, keepdim)
        return tensor.shape[dim] - 1 - usual(tensor.flip(dim), dim, keepdim)

    return run


def _div(usual: Kernel) -> Kernel:
    """Divide by multiplying by the reciprocal (O24: PT_HPU_ENABLE_DIV_PRECISE is off), so x / x may differ from 1."""

    def run(left: torch.Tensor, right: Any) -> torch.Tensor:
        if not (isinstance(right, torch.Tensor) and left.is_floating_point() and right.is_floating_point()):
            return usual(left, right)
        return left * right.reciprocal()

    return run


def _gelu(usual: Kernel) -> Kernel:
    """Always compute the tanh approximation (O25: PT_HPU_FORCE_TANH_FOR_GELU is on)."""

    def run(tensor: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
        result: torch.Tensor = usual(tensor, approximate="tanh")
        return result

    return run


def _view_dtype(usual: Kernel) -> Kernel:
    """Convert the values in lazy mode instead of reinterpreting their bits (O39: bridge 1.19 and 1.24,
    lazy_kernels.cpp, view_utils.cpp).

    On a real card, copying such a view directly to the host still returns the original bits, but this is not emulated.
    If the dtypes have different sizes, the behavior of a card is unknown. The bits are then kept, because code that
    loads files relies on this.
    """

    def run(tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        converts = DEVICE.lazy and dtype != tensor.dtype and dtype.itemsize == tensor.dtype.itemsize
        return tensor.to(dtype) if converts else usual(tensor, dtype)

    return run


_OWN: dict[str, Callable[[Kernel], Kernel]] = {
    **dict.fromkeys(("index_reduce.default", "index_reduce_.default"), _index_reduce),
    "index_select.default": _index_select,
    "sort.stable": _sort,
    "where.self": _where,
    "topk.default": _topk,
    "gather.default": _gather,
    "matmul.default": _matmul,
    "multinomial.default": _multinomial,
    **dict.fromkeys(("index_copy.default", "index_copy_.default"), _index_copy),
    **dict.fromkeys(("index_put.default", "index_put_.default"), _index_put),
    **dict.fromkeys(
        ("scatter.src", "scatter_.src", "scatter_add.default", "scatter_add_.default"),
        _scatter,
    ),
    "argmax.default": _argmax,
    "div.Tensor": _div,
    "gelu.default": _gelu,
    "view.dtype": _view_dtype,
}


def _hostile(strict: Kernel, usual: Kernel) -> Kernel:
    def run(*args: Any, **kwargs: Any) -> Any:
        return (strict if DEVICE.hostile else usual)(*args, **kwargs)

    return run


def register() -> None:
    for name, make in _OWN.items():
        packet, _, overload = name.partition(".")
        usual = kernels.KERNELS.get(name) or getattr(getattr(aten, packet), overload)
        kernels.KERNELS[name] = _hostile(make(usual), usual)

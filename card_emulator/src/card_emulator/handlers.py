"""Handlers for operations that do more than compute: copies between host and card, casts to FP8, in-place reshapes, and
indexing with masks or with indices in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from card_emulator import kernels
from card_emulator.card import DEVICE, Allocation, DeviceRefusal
from card_emulator.ops import OpInfo
from card_emulator.tensor import (
    DeviceTensor,
    Handler,
    check_range,
    download,
    execute,
    garbage,
    handle,
    info_of,
    real,
    view_of,
    wide,
)


def _upload(target: DeviceTensor, host: torch.Tensor) -> None:
    device = DEVICE
    if device.blocked is not None:
        raise DeviceRefusal(device.blocked)
    device.refuse_in_capture("a host tensor is copied to the device")
    step = device.counters.step
    step.uploads += 1
    step.upload_bytes += host.nbytes
    if device.lazy and host.dtype is torch.int64 and not host.is_meta:
        check_range(host, "upload")
    if device.queue.is_pending(target):
        device.implicit_marker("upload onto a pending tensor")
    if device.compile_only:
        return
    if target.dtype is torch.float8_e4m3fn and host.dtype is not torch.float8_e4m3fn:
        host = kernels.to_e4m3(host.float(), device.e4m3_max)
    elif host.dtype is torch.float8_e4m3fn:
        host = kernels.as_read(host, device.e4m3_max)
    real(target).copy_(host)
    if target.dtype is torch.float64:
        wide(target, "upload")
    target.epoch = 0


def copy_(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if not isinstance(target, DeviceTensor):
        DEVICE.host_read("copy to the host", source.inner.nbytes)
        if DEVICE.compile_only:
            return garbage(target)
        if len(args) > 2 and args[2] and not target.is_pinned():
            return _arrives_late(target, real(source))
        return target.copy_(real(source))
    if not isinstance(source, DeviceTensor):
        if source.dim() == 0 and not DEVICE.queue.is_pending(target) and source.numel() != target.numel():
            return execute(info_of(torch.ops.aten.fill_.Scalar), (target, source.item()), {})
        _upload(target, source)
        return target
    if target.dtype is torch.float8_e4m3fn and source.dtype is not torch.float8_e4m3fn:
        return execute(info, (target, source), {}, _copy_e4m3)
    return execute(info, (target, source), {})


def _arrives_late(host: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Fill the host tensor with garbage, and replace it with the values when the program synchronizes with the card.

    A Gaudi copies to unpinned memory through a staging buffer, and a callback empties this buffer. Events do not wait
    for the callback (bridge 1.19, device.cpp and lazy_kernels.cpp, copy_hpu_lazy_D2H).
    """
    if not DEVICE.model.downloads_late or not DEVICE.hostile:
        return host.copy_(values)
    DEVICE.late.append((host, values.clone()))
    return host.fill_(torch.nan if host.is_floating_point() else 1)


def _copy_e4m3(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return target.copy_(kernels.to_e4m3(source, DEVICE.e4m3_max))


def _to_copy(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor: DeviceTensor = args[0]
    where = kwargs.get("device")
    dtype = kwargs.get("dtype")
    if where is not None and torch.device(where).type != DEVICE.where.type:
        waits = not kwargs.get("non_blocking")
        result = download("copy to the host", tensor)
        if dtype is not None:
            result = result.to(dtype)
        # Torch 2.11 may allocate pinned memory here; we have not checked its C++ code.
        return result if waits or DEVICE.compile_only else _arrives_late(torch.empty_like(result), result)
    rest = {key: kwargs[key] for key in ("dtype", "memory_format") if kwargs.get(key) is not None}
    if dtype is torch.float8_e4m3fn and tensor.dtype is not torch.float8_e4m3fn:
        return execute(info, (tensor,), {}, _cast_e4m3)
    return execute(info, (tensor,), rest)


def _cast_e4m3(tensor: torch.Tensor) -> torch.Tensor:
    return kernels.to_e4m3(tensor, DEVICE.e4m3_max)


def _to_dtype(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if args[1] is torch.float8_e4m3fn and args[0].dtype is not torch.float8_e4m3fn:
        return execute(info_of(torch.ops.aten._to_copy.default), (args[0],), {}, _cast_e4m3)
    return execute(info, args, kwargs)


def _one_hot(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    num_classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if num_classes == -1:
        DEVICE.dynamic("aten.one_hot without num_classes")
        num_classes = int(real(args[0]).max()) + 1
    return execute(info, (args[0], num_classes), {}, kernels.one_hot)


def _indexed(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an indexing operation. Masks are counted because their results have data-dependent shapes, and indices on the
    host are copied to the card."""
    indices = []
    for index in args[1]:
        if isinstance(index, torch.Tensor):
            if index.dtype in (torch.bool, torch.uint8):
                DEVICE.dynamic(f"aten.{info.name} with a boolean mask")
            if not isinstance(index, DeviceTensor):
                DEVICE.fallback(f"aten.{info.name} with indices on the host")
                index = index.to(DEVICE.where)
        indices.append(index)
    if any(index is None for index in indices) and info.packet != "index":
        DEVICE.counters.event("index_put_ with an empty index", info.name)
    return execute(info, (args[0], indices, *args[2:]), kwargs)


def _never_pinned(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return False


def _reshape_in_place(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Change the shape or strides of a tensor in place. This needs no operation on the card, because the host stores
    the shapes and strides. It is rejected during a capture, because nobody has tested this on a card."""
    target: DeviceTensor = args[0]
    DEVICE.refuse_in_capture(f"aten.{info.name} changes the geometry of a device tensor in place")
    rest = [item.inner if isinstance(item, DeviceTensor) else item for item in args[1:]]
    source = next((item for item in args[1:] if isinstance(item, DeviceTensor)), target)
    changed = info.func(torch.ops.aten.alias.default(target.inner), *rest, **kwargs)
    memory = source.memory if info.packet == "set_" else target.memory
    if memory.nbytes < changed.untyped_storage().nbytes():
        memory = Allocation(changed.untyped_storage().nbytes())
    target.data = view_of(target, changed, memory, target.part)
    return target


_BY_NAME: dict[str, Handler] = {
    "copy_.default": copy_,
    "_to_copy.default": _to_copy,
    "to.dtype": _to_dtype,
    "one_hot.default": _one_hot,
    "index.Tensor": _indexed,
    "index_put_.default": _indexed,
    "index_put.default": _indexed,
    "is_pinned.default": _never_pinned,
    "reshapes in place": _reshape_in_place,
}


def register() -> None:
    for name, handler in _BY_NAME.items():
        handle(name, handler)

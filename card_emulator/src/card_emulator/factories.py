"""Kernels that create tensors on the device. Torch has no such kernels for the device's dispatch key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.library import Library

from card_emulator.card import DEVICE, DeviceRefusal
from card_emulator.handlers import copy_
from card_emulator.ops import OpInfo, classify
from card_emulator.tensor import DeviceTensor, Operation, info_of, real

aten = torch.ops.aten

# Operations without tensor arguments. All other factory functions (zeros, full, randn, new_*, *_like) consist of
# `empty` and an in-place operation.
_COMPUTED = (
    "arange",
    "arange.start",
    "arange.start_step",
    "linspace",
    "eye",
    "eye.m",
    "tril_indices",
    "triu_indices",
    "randperm",
    "randperm.generator",
)
_UNINITIALIZED = ("empty.memory_format", "empty_strided")
_library: Library | None = None


def _kernel(func: Any, computes: bool) -> Any:
    info: OpInfo = classify(func, DEVICE.model.lacks)

    def make(*args: Any, **kwargs: Any) -> DeviceTensor:
        return _make(info, args, kwargs, computes)

    return make


def _make(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any], computes: bool) -> DeviceTensor:
    device = DEVICE
    if device.blocked is not None:
        raise DeviceRefusal(device.blocked)
    device.opened()
    kwargs.pop("pin_memory", None)  # device memory is never pinned
    kwargs.pop("layout", None)
    if torch.device(kwargs.get("device") or DEVICE.where).index not in (None, DEVICE.where.index):
        raise RuntimeError(f"a process has one device, {DEVICE.where}; {kwargs['device']} was requested")
    kwargs["device"] = "cpu"
    if info.packet == "randperm" and kwargs.get("generator") is None:
        kwargs["generator"] = device.generator
    where = {**kwargs, "device": "meta"} if device.compile_only else kwargs
    if device.compile_only:
        where.pop("generator", None)
    tensor = DeviceTensor(info.func(*args, **where))
    capture = device.capture
    if computes:
        device.counters.step.ops += 1
        device.counters.step.bytes_moved += tensor.memory.nbytes
    if capture is not None:
        capture.record(Operation(info, info.func._op, args, kwargs, (tensor,), [tensor], True))
    elif computes:
        # In a lazy graph, uninitialized memory is an input rather than a node.
        key = [info.name, *(str(arg) for arg in args)]
        device.queue.record(key, (tensor,), (), True)
        device.counters.step.stray_ops += 1
    return tensor


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    # Torch's C++ code calls this kernel with Python dispatch disabled, for example to index with a list or to load a
    # file to the card. Calling Tensor.copy_ here would lead to infinite recursion.
    result: torch.Tensor = copy_(info_of(aten.copy_.default), (target, source, non_blocking), {})
    return result


def _local_scalar(tensor: DeviceTensor) -> Any:
    DEVICE.host_read("item", tensor.element_size())
    return real(tensor).item()


def register() -> None:
    global _library
    _library = Library("aten", "IMPL", DEVICE.model.dispatch_key)
    for names, computes in ((_COMPUTED, True), (_UNINITIALIZED, False)):
        for name in names:
            packet, _, overload = name.partition(".")
            func = getattr(getattr(aten, packet), overload or "default")
            _library.impl(name, _kernel(func, computes))
    _library.impl("_copy_from", _copy_from)
    _library.impl("_local_scalar_dense", _local_scalar)
    # When scaled_dot_product_attention is decomposed, it calls this function. The result 0 selects plain matmuls.
    _library.impl("_fused_sdp_choice", lambda *args, **kwargs: 0)

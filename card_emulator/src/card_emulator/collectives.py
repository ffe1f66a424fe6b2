"""A replacement for a Gaudi's `hccl` backend, which runs collectives on the CPU with Gloo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from card_emulator.card import DEVICE, DeviceRefusal
from card_emulator.kernels import through_float32
from card_emulator.ops import OpInfo
from card_emulator.tensor import DeviceTensor, handle_namespace, real


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _collective(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a collective on device tensors. A collective launches the pending operations. During a graph capture, it is
    rejected unless lazy collectives are enabled."""
    device = DEVICE
    name = f"c10d.{info.packet}"
    if device.blocked is not None:
        raise DeviceRefusal(device.blocked)
    if device.capture is not None:
        device.capture.check_collective(name)
    if device.hostile:
        _check_on_a_gaudi(info, name, args)
    device.counters.step.collectives += 1
    device.implicit_marker(name)
    if device.capture is not None:
        device.capture.record_kernel(lambda *inner: _issue_and_wait(info, inner), args)
    inners: list[tuple[torch.Tensor, DeviceTensor]] = []
    # Leave the wait to the caller. Gloo's point-to-point work can be waited for only once, so waiting here would make
    # the caller's wait fail.
    return _rewrap(info.func(*[_unwrap(arg, inners) for arg in args]), inners)


_REDUCTIONS = ("allreduce_", "reduce_", "reduce_scatter_", "_reduce_scatter_base_")


def _check_on_a_gaudi(info: OpInfo, name: str, args: Sequence[Any]) -> None:
    """Reject or count operations that HCCL does not support directly.

    HCCL transfers words of two or four bytes. It can sum only float32 and bfloat16, so all other dtypes are summed in
    float32 (bridge 1.19, hccl_kernels.cpp and process_group_lazy_hccl.cpp). A group's first collective creates the
    group's communicator, which is not possible during a capture.
    """
    tensors = list(_tensors(args))
    for tensor in tensors:
        if tensor.element_size() == 1 and tensor.numel() % 2:
            raise DeviceRefusal(f"{name} of {tensor.numel()} elements of {tensor.dtype}: their count is not even")
        if info.packet in _REDUCTIONS and tensor.dtype not in (torch.float32, torch.bfloat16):
            DEVICE.counters.event("a sum through float32", f"{name} of {tensor.dtype}")
            if not DEVICE.compile_only:
                through_float32(real(tensor))
    group = _group_name(args)
    if DEVICE.capture is not None and group not in DEVICE.communicators:
        raise DeviceRefusal(f"{name} is the first collective of its group and creates a communicator during a capture")
    if not DEVICE.compile_only:
        DEVICE.communicators.add(group)


def _tensors(value: Any) -> Iterator[DeviceTensor]:
    if isinstance(value, DeviceTensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _group_name(args: Sequence[Any]) -> str:
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and str(arg._type()).endswith("ProcessGroup"):
            return str(dist.ProcessGroup.unbox(arg).group_name)
    raise TypeError("a collective without a process group")


def _issue_and_wait(info: OpInfo, args: Sequence[Any]) -> None:
    """Run a collective during a replay and wait for it, because its caller does not wait."""
    out = info.func(*args)
    (out[-1] if isinstance(out, (tuple, list)) else out).wait()


def _unwrap(value: Any, inners: list[tuple[torch.Tensor, DeviceTensor]]) -> Any:
    if isinstance(value, DeviceTensor):
        # In compile-only mode, ranks still run collectives to stay synchronized, but the values are discarded.
        inner = torch.zeros(value.shape, dtype=value.dtype) if DEVICE.compile_only else real(value)
        inners.append((inner, value))
        value.epoch = 0
        return inner
    if isinstance(value, (list, tuple)):
        return [_unwrap(item, inners) for item in value]
    return value


def _rewrap(value: Any, inners: list[tuple[torch.Tensor, DeviceTensor]]) -> Any:
    if isinstance(value, torch.Tensor):
        return next((wrapper for inner, wrapper in inners if inner is value), value)
    if isinstance(value, (list, tuple)):
        return type(value)(_rewrap(item, inners) for item in value)
    return value


def register() -> None:
    handle_namespace("c10d", _collective)
    if "hccl" not in dist.Backend.backend_list:
        dist.Backend.register_backend("hccl", _create, devices=[DEVICE.where.type, "cpu"])

"""The collective backend `hccl` (Habana's and Huawei's have one name): gloo, on the values of the device tensors."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vllm_gaudi_spec.emulator.card import DEVICE, DeviceRefusal
from vllm_gaudi_spec.emulator.ops import OpInfo
from vllm_gaudi_spec.emulator.tensor import DeviceTensor, handle_namespace, real


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _collective(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A collective on device tensors: cuts the pending graph, and is refused inside a captured one unless allowed."""
    device = DEVICE
    name = f"c10d.{info.packet}"
    if device.blocked is not None:
        raise DeviceRefusal(device.blocked)
    if device.capture is not None:
        device.capture.check_collective(name)
    device.counters.step.collectives += 1
    device.implicit_marker(name)
    if device.capture is not None:
        device.capture.record_kernel(lambda *inner: _issue_and_wait(info, inner), args)
    inners: list[tuple[torch.Tensor, DeviceTensor]] = []
    # The caller waits, once: gloo's point-to-point work can be waited for no more than that.
    return _rewrap(info.func(*[_unwrap(arg, inners) for arg in args]), inners)


def _issue_and_wait(info: OpInfo, args: Sequence[Any]) -> None:
    """For replays, where nobody else waits."""
    out = info.func(*args)
    (out[-1] if isinstance(out, (tuple, list)) else out).wait()


def _unwrap(value: Any, inners: list[tuple[torch.Tensor, DeviceTensor]]) -> Any:
    if isinstance(value, DeviceTensor):
        # Ranks stay in step in compile-only mode too, on values that nobody keeps.
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

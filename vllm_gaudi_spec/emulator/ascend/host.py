"""What stock torch lacks on the host's side of an NPU: pinned memory, and an accelerator that answers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _device

from vllm_gaudi_spec.emulator import runtime
from vllm_gaudi_spec.emulator.ascend.streams import STREAMS, synchronize
from vllm_gaudi_spec.emulator.guard import patch
from vllm_gaudi_spec.emulator.tensor import DeviceTensor


def is_pinned(tensor: torch.Tensor, *args: Any) -> bool:
    return not isinstance(tensor, DeviceTensor) and getattr(tensor.untyped_storage(), "_pinned", False)


def _pin(fresh: torch.Tensor) -> torch.Tensor:
    """Pinned is the memory, hence every view of it."""
    fresh.untyped_storage()._pinned = True
    return fresh


def _patched_pin(original: Any) -> Any:
    def pin_memory(self: torch.Tensor, *args: Any) -> torch.Tensor:
        if isinstance(self, DeviceTensor):
            return original(self)
        return self if is_pinned(self) else _pin(self.clone())

    return pin_memory


def _patched_factory(original: Any) -> Any:
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = original(*args, **kwargs)
        return _pin(made) if pin_memory else made

    return make


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    """Asked wherever torch wants to know what accelerator there is."""

    def is_available(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


def install() -> None:
    torch._C._acc.register_python_privateuseone_hook(_Hooks())
    patch(torch.Tensor, "pin_memory", _patched_pin)
    patch(torch.Tensor, "is_pinned", lambda original: is_pinned)
    # What `with torch.device(...)` acts on is looked up once, and has to be the functions of torch itself.
    _device._device_constructors()
    for name in ("empty", "zeros", "tensor", "as_tensor"):
        patch(torch, name, _patched_factory)
    for name, function in {
        "synchronize": synchronize,
        "empty_cache": runtime.empty_cache,
        "empty_host_cache": runtime.empty_cache,
        "current_stream": STREAMS.current_stream,
        "set_stream": STREAMS.set_stream,
        "device_count": runtime.device_count,
        "current_device_index": runtime.current_device,
        "set_device_index": runtime.set_device,
        "get_memory_info": runtime.mem_get_info,
        "memory_allocated": runtime.memory_allocated,
        "memory_reserved": runtime.memory_allocated,
        "max_memory_allocated": runtime.max_memory_allocated,
        "reset_peak_memory_stats": runtime.reset_peak_memory_stats,
    }.items():
        setattr(torch.accelerator, name, function)

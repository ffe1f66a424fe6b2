"""Pinned host memory, which stock torch does not support for the emulated card. Pinning applies to a whole allocation
and therefore to all of its views."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _device

from card_emulator.card import DEVICE, DeviceRefusal
from card_emulator.guard import patch
from card_emulator.tensor import DeviceTensor


def is_pinned(tensor: torch.Tensor, *args: Any) -> bool:
    return not isinstance(tensor, DeviceTensor) and getattr(tensor.untyped_storage(), "_pinned", False)


def _pin(fresh: torch.Tensor) -> torch.Tensor:
    if DEVICE.where.type == "hpu" and DEVICE.hostile and not DEVICE.pid:
        # The driver allocates pinned memory, so the device must be open (bridge 1.19, PinnedMemoryAllocator.cpp).
        raise DeviceRefusal("pinned memory is allocated before the device was opened")
    fresh.untyped_storage()._pinned = True  # type: ignore[attr-defined]
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


def install() -> None:
    patch(torch.Tensor, "pin_memory", _patched_pin)
    patch(torch.Tensor, "is_pinned", lambda original: is_pinned)
    # Torch determines only once which functions `with torch.device(...)` affects. Do this before they are replaced.
    _device._device_constructors()
    for name in ("empty", "zeros", "tensor", "as_tensor"):
        patch(torch, name, _patched_factory)

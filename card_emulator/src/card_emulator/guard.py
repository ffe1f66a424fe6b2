"""Make torch accept the card's device type, for which its wheels contain no device guard."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from typing import Any

import torch

from card_emulator.card import DEVICE
from card_emulator.tensor import DeviceTensor

logger = logging.getLogger(__name__)

_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
# The registry is an array with one slot for each device type. Torch's ABI numbers the types (c10::DeviceType).
_META, _SLOTS = 14, 22


def install_device_guard() -> None:
    """Use the meta device's guard for the card as well.

    Torch asks a device's guard for the current device before and after slices and copies. Torch's wheels contain no
    guard for the card, so they raise "PyTorch is not linked with support for hpu devices". The meta device's guard does
    nothing, which is correct for a single device without streams.
    """
    slot = DEVICE.model.guard_slot
    path = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")
    try:
        registry = (ctypes.c_void_p * _SLOTS).in_dll(ctypes.CDLL(path), _REGISTRY)
    except (OSError, ValueError) as error:
        raise RuntimeError(f"torch {torch.__version__} has no device guard registry where expected: {error}") from error
    if not registry[_META] or registry[slot] not in (None, registry[_META]):
        raise RuntimeError(
            f"torch {torch.__version__}: slots {_META} and {slot} of the device guard registry hold "
            f"{registry[_META]} and {registry[slot]}; expected a guard for meta and none for the card"
        )
    registry[slot] = registry[_META]


def _indexed(device: Any) -> Any:
    """Return the device with its index. If the index were missing, torch would ask the device guard for it, and this
    guard would return the meta device."""
    if device is None or isinstance(device, torch.Tensor | torch.dtype | int):
        return device
    if isinstance(device, str) and device.startswith(DEVICE.where.type):
        device = torch.device(device)
    if isinstance(device, torch.device) and device.type == DEVICE.where.type:
        if device.index not in (None, DEVICE.where.index):
            raise RuntimeError(f"a process has one device, {DEVICE.where}; {device} was requested")
        return DEVICE.where
    return device


def patch(owner: Any, name: str, make: Any) -> None:
    original = getattr(owner, name)
    patched = make(original)
    functools.update_wrapper(patched, original, assigned=("__name__", "__qualname__", "__doc__"), updated=())
    setattr(owner, name, patched)


def _patched_to(original: Any) -> Any:
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            args = (_indexed(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _indexed(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _patched_constructor(original: Any) -> Any:
    """Create the tensor on the host and copy it to the card. Torch's C++ constructor cannot do this, because it fills
    the tensor with Python dispatch disabled."""

    def construct(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None:
            device = torch.empty(0).device  # the default device, which `with torch.device(...)` may have changed
        target = _indexed(torch.device(device) if isinstance(device, str) else device)
        if not isinstance(target, torch.device) or target != DEVICE.where:
            return original(data, *args, device=device, **kwargs)
        if isinstance(data, DeviceTensor):
            return data.to(*args, **kwargs) if args or kwargs.get("dtype") else data
        kwargs.pop("requires_grad", None)
        return original(data, *args, device="cpu", **kwargs).to(DEVICE.where)

    return construct


def _patched_new_tensor(original: Any) -> Any:
    def new_tensor(self: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.setdefault("device", self.device)
        kwargs.setdefault("dtype", self.dtype)
        return torch.tensor(data, **kwargs)

    return new_tensor


def install_patches() -> None:
    patch(torch.Tensor, "to", _patched_to)
    patch(torch.Tensor, "new_tensor", _patched_new_tensor)
    for name in ("tensor", "as_tensor", "asarray"):
        patch(torch, name, _patched_constructor)
    setattr(torch.Tensor, DEVICE.where.type, lambda self, *args, **kwargs: self.to(DEVICE.where))

"""`torch.accelerator` as it behaves on a machine with a Gaudi, where torch supports the card but not its allocator.

The functions raise the errors that users of real cards have reported: see patches.py and platform.py in vllm-gaudi, and
its pull requests 1383 (a Gaudi 3) and 1430. The reports cover `empty_cache`, `empty_host_cache`, `get_memory_info` and
`synchronize`. We assume that other functions that need the allocator fail in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from card_emulator import runtime
from card_emulator.card import DEVICE


def _refuse_allocator_call(*args: Any) -> NoReturn:
    raise RuntimeError("Allocator for hpu is not a DeviceAllocator")


def _refuse_host_cache(*args: Any) -> NoReturn:
    raise AttributeError("module 'torch._C' has no attribute '_host_emptyCache'")


def _refuse_memory_info(*args: Any) -> NoReturn:
    raise NotImplementedError("get_memory_info is not implemented for hpu")


def _refuse_synchronize(*args: Any) -> NoReturn:
    raise NotImplementedError("torch.accelerator.synchronize is not implemented for hpu; torch.hpu.synchronize is")


def _names() -> dict[str, Callable[..., Any]]:
    return {
        "_accelerator_getAccelerator": lambda: torch.device(DEVICE.where.type),
        "_accelerator_getDeviceIndex": runtime.current_device,
        "_accelerator_setDeviceIndex": runtime.set_device,
        "_accelerator_getStream": lambda index: torch.hpu.current_stream(),  # type: ignore[attr-defined]
        "_accelerator_setStream": lambda stream: torch.hpu.set_stream(stream),  # type: ignore[attr-defined]
        "_accelerator_isAllocatorInitialized": _refuse_allocator_call,
        "_accelerator_emptyCache": _refuse_allocator_call,
        "_accelerator_getDeviceStats": _refuse_allocator_call,
        "_accelerator_resetAccumulatedStats": _refuse_allocator_call,
        "_accelerator_resetPeakStats": _refuse_allocator_call,
        "_accelerator_emptyHostCache": _refuse_host_cache,
        "_accelerator_getMemoryInfo": _refuse_memory_info,
        "_accelerator_synchronizeDevice": _refuse_synchronize,
    }


def install() -> None:
    for name, function in _names().items():
        if hasattr(torch._C, name):  # older torch releases do not have all of these functions
            setattr(torch._C, name, function)

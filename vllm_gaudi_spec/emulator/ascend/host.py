"""What stock torch lacks on the host's side of an NPU: an accelerator that answers."""

from __future__ import annotations

import torch

from vllm_gaudi_spec.emulator import runtime
from vllm_gaudi_spec.emulator.ascend.streams import STREAMS, synchronize


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

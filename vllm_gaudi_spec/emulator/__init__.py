"""An emulated Intel Gaudi: `hpu` tensors on a CPU machine, as strict as the device, with everything costly counted.

    from vllm_gaudi_spec import emulator
    emulator.install(generation="gaudi2", lazy=True)

From then on the process has `torch.hpu`, tensors on `torch.device("hpu")` and a `habana_frameworks` package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_spec.emulator.card import Device

__all__ = ["device", "install", "tag_kv"]


def install(generation: str = "gaudi2", lazy: bool = True) -> None:
    """Change torch in this process so that it has the device. A second call may only ask for the same one."""
    import os

    import torch

    from vllm_gaudi_spec.emulator import factories, fused, guard, habana, handlers, hccl, runtime
    from vllm_gaudi_spec.emulator.card import DEVICE

    if DEVICE.installed:
        if (DEVICE.generation, DEVICE.lazy) != (generation, lazy):
            raise RuntimeError(
                f"this process already has a {DEVICE.generation} with lazy={DEVICE.lazy}; {generation} with "
                f"lazy={lazy} needs a process of its own"
            )
        return
    DEVICE.configure(generation, lazy)
    guard.install_device_guard()
    factories.register()
    handlers.register()
    fused.register()
    guard.install_patches()
    module = runtime.make_module()
    torch._register_device_module("hpu", module)
    habana.enter_modules(module)
    hccl.register()
    os.register_at_fork(after_in_child=DEVICE.after_fork)
    DEVICE.installed = True


def device() -> Device:
    """The process's card: settings, counters and reports."""
    from vllm_gaudi_spec.emulator.card import DEVICE

    return DEVICE


def tag_kv(tensor: torch.Tensor) -> torch.Tensor:
    """Count what is read from this tensor's memory, through any view of it, as KV bytes."""
    from vllm_gaudi_spec.emulator.tensor import HpuTensor

    if not isinstance(tensor, HpuTensor):
        raise TypeError(f"only tensors on hpu hold KV; this one is on {tensor.device}")
    tensor.memory.kv = True
    return tensor

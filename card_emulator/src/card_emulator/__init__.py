"""An emulated accelerator card for machines without a real one. It rejects what a real card would reject, and it counts
expensive operations.

    import card_emulator
    card_emulator.install(generation="gaudi2", lazy=True)

After this call, the process has one card, with a `torch.hpu` module, tensors on `torch.device("hpu")`, and a
`habana_frameworks` package. Code that applies only to a Gaudi is in `gaudi/`. An Ascend NPU is emulated one layer
lower, below Huawei's own torch_npu (`ascend/`), and shares only the report with the Gaudi. `card-emulator run` installs
a card into unmodified programs (`door.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from card_emulator.errors import SetupError

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    import torch

    from card_emulator.ascend.cann.card import Card
    from card_emulator.card import Device

_under_torch_npu: Card | None = None
"""The emulated card used by Huawei's torch_npu, or None."""

__version__ = "0.1.0"

__all__ = ["SetupError", "counted", "device", "install", "install_npu", "tag_kv"]


def install(generation: str = "gaudi2", lazy: bool = True) -> None:
    """Add an emulated Gaudi to torch in this process. Later calls must request the same card."""
    from card_emulator.card import DEVICE
    from card_emulator.gaudi import (
        accelerator,
        eager,
        experts,
        fused,
        habana,
        hpu,
        kernels,
        recomputing,
        torch_parts,
    )
    from card_emulator.gaudi.models import MODELS

    if generation not in MODELS:
        raise ValueError(f"generation must be one of {', '.join(MODELS)}, not {generation!r}")
    if _under_torch_npu is not None:
        raise RuntimeError(f"this process already has an Ascend NPU; {generation} needs its own process")
    if DEVICE.installed:
        if (DEVICE.model, DEVICE.lazy) != (MODELS[generation], lazy):
            raise RuntimeError(
                f"this process already has a {DEVICE.generation} with lazy={DEVICE.lazy}; {generation} with "
                f"lazy={lazy} needs its own process"
            )
        return
    DEVICE.configure(MODELS[generation], lazy)
    fused.register()
    experts.register()
    recomputing.register()
    eager.register()
    kernels.register()
    module = hpu.make_module()
    habana.enter_modules(module)
    _enter(module)
    accelerator.install()
    torch_parts.install()


def install_npu(torch_npu: Path, cache: Path) -> None:
    """Add an emulated Ascend NPU to torch in this process. Later calls do nothing.

    Args:
        torch_npu: The folder that contains Huawei's torch_npu package.
        cache: The folder in which the emulated CANN below torch_npu is compiled.
    """
    from card_emulator.card import DEVICE

    global _under_torch_npu
    if DEVICE.installed:
        raise RuntimeError(f"this process already has a {DEVICE.generation}; an NPU needs its own process")
    if _under_torch_npu is None:
        from card_emulator.ascend import cann

        _under_torch_npu = cann.install(torch_npu, cache)


def _enter(module: ModuleType) -> None:
    """Register the emulated device and its kernels with torch."""
    import os

    import torch

    from card_emulator import collectives, factories, guard, handlers, parameters, pinned
    from card_emulator.card import DEVICE

    guard.install_device_guard()
    factories.register()
    handlers.register()
    guard.install_patches()
    parameters.install()
    pinned.install()
    torch._register_device_module(DEVICE.where.type, module)
    collectives.register()
    os.register_at_fork(after_in_child=DEVICE.after_fork)
    DEVICE.installed = True


def counted() -> Device | Card:
    """Return the card whose counters are reported: the emulated NPU if it is installed, or else `device()`."""
    return device() if _under_torch_npu is None else _under_torch_npu


def device() -> Device:
    """Return the emulated Gaudi of this process, which holds its settings and counters."""
    from card_emulator.card import DEVICE

    return DEVICE


def tag_kv(tensor: torch.Tensor) -> torch.Tensor:
    """Count all reads of this tensor's memory, including reads through views, as KV bytes. This has no effect under
    torch_npu, because the emulated CANN does not know which tensor an address belongs to."""
    if _under_torch_npu is not None:
        return tensor
    from card_emulator.tensor import DeviceTensor

    if not isinstance(tensor, DeviceTensor):
        raise TypeError(f"tag_kv needs a tensor on the emulated card; this tensor is on {tensor.device}")
    tensor.memory.kv = True
    return tensor

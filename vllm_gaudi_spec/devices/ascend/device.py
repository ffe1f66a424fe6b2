"""Imports torch_npu, which gives torch the "npu" device and the "hccl" process group.

This module is imported together with the platform, because vLLM uses the device name before it creates a backend. For
example, another process may unpickle a configuration that contains the device.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from packaging.version import Version

from vllm_gaudi_spec import environment
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.device_table import choose_device

_OLDEST = (2, 13)
"""The oldest supported release of torch_npu. In earlier ones, torch.accelerator fails an assertion after the weights
are loaded."""


def refusal(version: str, variables: Mapping[str, str], torch_version: str) -> str | None:
    """Return why this process cannot use the NPU, in one line, or None if it can. torch_npu itself would fail only
    during graph capture."""
    if Version(version).release[:2] < _OLDEST:
        return (
            f"torch_npu {version} is installed, but device ascend needs 2.13 or newer with vLLM's torch: "
            "pip install torch-npu==2.13.0."
        )
    minor, of_torch = Version(version).release[:2], Version(torch_version).release[:2]
    if minor != of_torch:
        remedy = f"torch-npu=={_dotted(of_torch)}.0" if of_torch >= _OLDEST else f"torch=={_dotted(minor)}.0"
        return (
            f"torch_npu {version} is for torch {_dotted(minor)}, but torch {torch_version} is installed; pip install "
            f"{remedy}."
        )
    if variables.get(environment.LAUNCH_BLOCKING.name) == "1":
        return (
            f"{environment.LAUNCH_BLOCKING.name}=1 waits for each operation and prevents NPU graph capture; unset it."
        )
    if variables.get(environment.TASK_QUEUE.name) == "2":
        return f"{environment.TASK_QUEUE.name}=2 prevents NPU graph capture; set it to 1."
    settings = variables.get(environment.NPU_ALLOCATOR.name, "").replace(" ", "").lower()
    if "pin_memory_expandable_segments:true" in settings:
        return (
            f"pin_memory_expandable_segments prevents graph capture; remove it from {environment.NPU_ALLOCATOR.name}."
        )
    return None


# torch_npu's numbers for card types (NpuVariables.h). Cards from 220 on support bfloat16, and 240 to 249 are the 310B.
_FIRST_SERVED = 220
_NOT_SERVED = range(240, 250)


def refuse_other_cards() -> None:
    """Reject older cards and the 310 series, which lack KV-write kernels or fused attention over KV blocks.

    Without this check, they would fail only after the weights are loaded. The card must already be open.
    """
    npu = torch_npu().npu
    number = npu.get_soc_version()
    if number < _FIRST_SERVED or number in _NOT_SERVED:
        raise UnsupportedConfigError(
            f"{npu.get_device_name()} has no fused attention over KV blocks; device ascend is for Atlas A2, A3 and "
            "newer cards: use vllm-ascend, or set VGS_DEVICE=cpu."
        )


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def usable_torch_npu() -> Any:
    """Import torch_npu, and reject an unsupported version or environment before a card is opened."""
    module = torch_npu()
    if why := refusal(module.__version__, environment.list_npu_variables(), torch.__version__):
        raise UnsupportedConfigError(why)
    return module


def torch_npu() -> Any:
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise UnsupportedConfigError(
            f"device ascend needs torch_npu and CANN, which come with Huawei's images ({error}); without an NPU, set "
            "VGS_DEVICE to ascend-emulated or cpu."
        ) from error


# Ignore a missing or broken torch_npu or emulator here. The backend reports it when it is created.
with suppress(UnsupportedConfigError, ImportError):
    if choose_device() == "ascend-emulated":
        from vllm_gaudi_spec.devices.common.emulated import install_npu

        install_npu()
    torch_npu()

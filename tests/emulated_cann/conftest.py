"""Huawei's own torch_npu over the emulated CANN, in a process of its own (VGS_DEVICE=ascend-emulated)."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_gaudi_spec import emulator
from vllm_gaudi_spec.environment import cache_folder, set_torch_npu_defaults, torch_npu_folder


@pytest.fixture(scope="session")
def card() -> Any:
    set_torch_npu_defaults()
    emulator.install_npu(torch_npu_folder(), cache_folder())
    return emulator.counted()


@pytest.fixture(scope="session")
def npu(card: Any) -> Any:
    """`torch.npu`."""
    import torch

    torch.npu.set_device(0)
    return torch.npu

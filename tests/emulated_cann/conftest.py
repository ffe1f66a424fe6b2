"""The vendor's own torch_npu over the emulated CANN, for `make verify-torch-npu`: VGS_TORCH_NPU is its folder."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_gaudi_spec import emulator
from vllm_gaudi_spec.environment import TORCH_NPU, cache_folder, set_torch_npu_defaults, torch_npu_folder


@pytest.fixture(scope="session")
def card() -> Any:
    assert torch_npu_folder() is not None, f"{TORCH_NPU.name} is not set: make verify-torch-npu sets it"
    set_torch_npu_defaults()
    emulator.install_npu(torch_npu_folder(), cache_folder())
    return emulator.counted()


@pytest.fixture(scope="session")
def npu(card: Any) -> Any:
    """`torch.npu`."""
    import torch

    torch.npu.set_device(0)
    return torch.npu

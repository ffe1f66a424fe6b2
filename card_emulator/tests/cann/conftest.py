"""Huawei's own torch_npu over the emulated CANN."""

import os
from typing import Any

import cann_processes
import pytest

import card_emulator

# Children of multiprocessing get the path of this process, on which torch would find torch_npu before CANN is there.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


@pytest.fixture(scope="session")
def card() -> Any:
    cann_processes.install()
    return card_emulator.counted()


@pytest.fixture(scope="session")
def npu(card: Any) -> Any:
    import torch

    torch.npu.set_device(0)
    return torch.npu

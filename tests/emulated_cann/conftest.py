"""Huawei's own torch_npu over the emulated CANN, in a process of its own (VGS_DEVICE=ascend-emulated)."""

from typing import Any

import pytest


@pytest.fixture(scope="session")
def npu() -> Any:
    import torch

    from vllm_gaudi_spec.devices.ascend import device  # noqa: F401  (which brings torch.npu)

    torch.npu.set_device(0)
    return torch.npu

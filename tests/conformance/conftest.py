"""One backend a process: an emulated device changes torch for good. VGS_DEVICE says which."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from vllm_gaudi_spec.backends.base import DeviceBackend


@pytest.fixture(scope="session")
def backend() -> DeviceBackend:
    """As a worker finds it when it loads its model."""
    from vllm.platforms import current_platform

    from vllm_gaudi_spec.backends import load_backend

    backend = load_backend()
    current_platform.set_device(torch.device(backend.torch_device.type, 0))
    current_platform.import_kernels()
    current_platform.import_ir_kernels()
    return backend


@pytest.fixture(autouse=True)
def as_in_steps() -> Iterator[None]:
    with torch.inference_mode():
        yield

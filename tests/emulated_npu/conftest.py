"""An emulated NPU, in a process that has no other card: tests/unit/emulator/test_emulator_npu.py starts one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def card() -> Iterator[Any]:
    """As after installation."""
    from vllm_gaudi_spec import emulator

    emulator.install_npu()
    card = emulator.device()
    card.reset()
    with torch.inference_mode():
        yield card
    card.reset()


@pytest.fixture
def torch_npu(card: Any) -> Any:
    import torch_npu

    return torch_npu

"""An emulated Gaudi in eager mode, in a process of its own: tests/unit/emulator/test_gaudi_backend.py starts one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def card() -> Iterator[Any]:
    import card_emulator

    card_emulator.install("gaudi2", lazy=False)
    card = card_emulator.device()
    card.reset()
    with torch.inference_mode():
        yield card
    card.reset()

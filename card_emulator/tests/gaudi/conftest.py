"""An emulated Gaudi 2 in lazy mode, which a process has for the rest of its life."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import card_emulator


@pytest.fixture
def card() -> Iterator[Any]:
    card_emulator.install(generation="gaudi2", lazy=True)
    card = card_emulator.device()
    card.reset()
    with torch.inference_mode():
        yield card
    card.reset()

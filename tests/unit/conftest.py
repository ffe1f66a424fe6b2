"""Fixtures of several unit tests."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def card() -> Iterator[Any]:
    """The emulated card, as after installation. It changes torch for the rest of the process, in ways that tests of
    other things do not notice."""
    import card_emulator
    from vllm_gaudi_spec.devices.common import emulated  # noqa: F401  (which names the files that pass work on)

    card_emulator.install(generation="gaudi2", lazy=True)
    card = card_emulator.device()
    card.reset()
    with torch.inference_mode():
        yield card
    card.reset()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run torch on one thread: more of them are slower where tensors are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

"""Set up what all tests need: threads that sleep while they wait, and fixed seeds."""

import os

import pytest

# Read when torch is loaded: threads that spin make tiny programs ten times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    import torch

    torch.manual_seed(0)

"""Every backend keeps the promises of `DeviceBackend`: tests/conformance, in a process of its own for each device."""

from __future__ import annotations

import pytest

from tests.support.processes import run_tests


@pytest.mark.parametrize(
    "device", ["cpu", "hpu-emulated", "ascend-emulated", pytest.param("cuda", marks=pytest.mark.cuda)]
)
def test_a_backend(device: str) -> None:
    run_tests("tests/conformance", VGS_DEVICE=device, PT_HPU_LAZY_MODE="1")

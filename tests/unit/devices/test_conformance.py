"""Every backend keeps the promises of `DeviceBackend`: tests/conformance, in a process of its own for each device."""

from __future__ import annotations

import pytest

from tests.support.processes import run_tests
from vllm_gaudi_spec.devices import DEVICES

ON_HOST = [name for name, device in DEVICES.items() if device.computes_on_host]


@pytest.mark.parametrize("device", [*ON_HOST, pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_backend(device: str) -> None:
    run_tests("tests/conformance", VGS_DEVICE=device, PT_HPU_LAZY_MODE="1")


def test_a_gaudi_in_compiled_mode() -> None:
    run_tests("tests/conformance", VGS_DEVICE="hpu-emulated", PT_HPU_LAZY_MODE="0")

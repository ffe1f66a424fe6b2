"""Every backend keeps the promises of `DeviceBackend`: tests/conformance, in a process of its own for each device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "device", ["cpu", "hpu-emulated", "ascend-emulated", pytest.param("cuda", marks=pytest.mark.cuda)]
)
def test_a_backend(device: str) -> None:
    command = [sys.executable, "-m", "pytest", "tests/conformance", "-q", "--no-header", "-p", "no:cacheprovider"]
    environment = os.environ | {"VGS_DEVICE": device, "PT_HPU_LAZY_MODE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"on {device}:\n{done.stdout}", pytrace=False)

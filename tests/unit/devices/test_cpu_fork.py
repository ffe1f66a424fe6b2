"""The engine process is forked only from a process whose child could compute."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("before", "method"), [("", "fork"), ("torch.ones(1 << 22).exp_();", "spawn")])
def test_start_method(before: str, method: str) -> None:
    code = f"import torch; torch.set_num_threads(2); {before}"
    code += "from vllm_gaudi_spec.devices.cpu.fork import start_method; print(start_method())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split()[-1] == method

"""Processes with an emulated NPU: this one, and others behind a door."""

import os
import subprocess
import sys

import card_emulator
from card_emulator import door
from card_emulator.names import ASCEND910B


def install() -> None:
    card_emulator.install_npu(door.torch_npu_folder(), door.cache_folder())


def run_python(script: str) -> str:
    """Return what a script prints in a process of its own, in which `import torch` brings the NPU.

    The output is not buffered, because most scripts end without torch_npu's own end.
    """
    chosen = door.variables(door.cached_door(ASCEND910B), ASCEND910B)
    chosen["PYTHONPATH"] += os.pathsep + os.path.dirname(__file__)
    command = [sys.executable, "-u", "-c", script]
    return subprocess.run(
        command, env=os.environ | chosen, capture_output=True, text=True, check=True, timeout=300
    ).stdout

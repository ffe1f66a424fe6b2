"""An emulated CANN that runs Huawei's torch_npu on a machine without an NPU."""

from __future__ import annotations

import ctypes
import importlib
import platform
import sys
from pathlib import Path

import torch

from card_emulator.ascend.cann import build
from card_emulator.ascend.cann.card import Card
from card_emulator.errors import SetupError


def install(folder: Path, cache: Path) -> Card:
    """Import torch_npu from `folder` with the emulated CANN below it, and return the card."""
    if "torch_npu" in sys.modules:  # it runs on a real CANN, which can no longer be replaced
        raise SetupError(
            "torch loaded torch_npu before the emulated CANN was installed; set TORCH_DEVICE_BACKEND_AUTOLOAD=0."
        )
    if not (folder / "torch_npu").is_dir():
        raise SetupError(
            f"The emulated NPU runs Huawei's torch_npu, which is not in {folder}; {sys.executable} -m pip install "
            f"--no-deps --target {folder} torch-npu==2.13.0, or name another folder with torch_npu."
        )
    libraries = build.build(folder / "torch_npu", cache / "cann")
    # After the libraries are loaded, they are found by name, without LD_LIBRARY_PATH.
    loaded = [ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL) for name in (build.LIBRARY, *build.NAMES)]
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise SetupError(
            f"torch_npu in {folder} does not load ({error}): it must be built for Python {sys.version_info[0]}."
            f"{sys.version_info[1]}, torch {torch.__version__} and {platform.machine()}."
        ) from error
    return Card(loaded[0])

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
    """Import torch_npu from `folder` on top of the emulated CANN, and return the card."""
    if "torch_npu" in sys.modules:  # torch_npu already uses a real CANN, which can no longer be replaced
        raise SetupError(
            "torch loaded torch_npu before the emulated CANN was installed; set TORCH_DEVICE_BACKEND_AUTOLOAD=0."
        )
    if not (folder / "torch_npu").is_dir():
        raise SetupError(
            f"The emulated NPU needs Huawei's torch_npu, which is not in {folder}. Run {sys.executable} -m pip install "
            f"--no-deps --target {folder} torch-npu==2.13.0, or specify another folder that contains torch_npu."
        )
    libraries = build.build(folder / "torch_npu", cache / "cann")
    # Once these libraries are loaded, torch_npu finds them by name, without LD_LIBRARY_PATH.
    loaded = [ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL) for name in (build.LIBRARY, *build.NAMES)]
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise SetupError(
            f"torch_npu in {folder} cannot be loaded ({error}). It must be built for Python {sys.version_info[0]}."
            f"{sys.version_info[1]}, torch {torch.__version__} and {platform.machine()}."
        ) from error
    return Card(loaded[0])

"""An emulated CANN, for Huawei's own torch_npu on a machine without an NPU."""

from __future__ import annotations

import ctypes
import importlib
import sys
from pathlib import Path

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.emulator.ascend.cann import build
from vllm_gaudi_spec.emulator.ascend.cann.card import Card


def install(folder: Path, cache: Path) -> Card:
    """Make `import torch_npu` work: from `folder`, over the emulated CANN."""
    if not (folder / "torch_npu").is_dir():
        raise UnsupportedConfigError(
            f"ascend-emulated runs Huawei's torch_npu, which is not in {folder}; pip install --no-deps --target "
            f"{folder} torch-npu==2.13.0, or name its folder in VGS_TORCH_NPU."
        )
    libraries = build.build(folder / "torch_npu", cache / "cann")
    # Found by their names from here on; nothing has to stand in LD_LIBRARY_PATH.
    loaded = [ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL) for name in (build.LIBRARY, *build.NAMES)]
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.import_module("torch_npu")
    return Card(loaded[0])

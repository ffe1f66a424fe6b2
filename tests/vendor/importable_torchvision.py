"""Loaded by torch at the end of its import (entry point `torch.backends`): environment.py."""

from pathlib import Path


def load() -> None:
    import vision

    vision.make_importable(Path(__file__).parent / "torchvision_files")

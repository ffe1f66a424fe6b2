"""Loaded by torch at the end of its import, as Habana's bridge is (entry point `torch.backends`): environment.py."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path


def load() -> None:
    from vllm_gaudi_spec import emulator

    emulator.install(generation=os.environ.get("VGS_EMULATED_GENERATION", "gaudi2"), lazy=True)
    # vllm-gaudi relies on the last row (v0.26.0, extension/ops.py, grouped_max), or on the slots of block -1
    # (extension/defragmentation.py).
    card = emulator.device()
    card.model = dataclasses.replace(card.model, counts_from_the_end=True)
    import vision

    vision.make_importable(Path(__file__).parent / "torchvision_files")

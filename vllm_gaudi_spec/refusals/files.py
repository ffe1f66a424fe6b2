"""Which files are not loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from vllm_gaudi_spec.config import pickled_weights
from vllm_gaudi_spec.refusals.models import models_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend


# As vLLM's loader looks for them, and others of the kind.
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Formats of --load-format that are pickles, or that fall back to them.
_PICKLE_FORMATS = ("pt", "npcache")
_FALLING_BACK = ("auto", "hf")


def pickle_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    """What the loader would refuse as well (`compat.refuse_pickled_weights`), but in the engine and later."""
    for model, load_format in models_of(vllm_config):
        if load_format in _PICKLE_FORMATS:
            yield f"Load format {load_format} reads pickles; give models with *.safetensors, and leave it out."
        folder = Path(model.model)
        if load_format not in _FALLING_BACK or not folder.is_dir() or any(folder.glob("*.safetensors")):
            continue
        if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
            yield pickled_weights(model.model, pickles[0])


_CONSOLIDATED = "consolidated*.safetensors"
# Formats of --load-format in which vLLM's loader reads files and an index of one kind; auto is one of them.
_SAFETENSORS_FORMATS = ("hf", "safetensors", "fastsafetensors", "instanttensor")


def weight_files(folder: Path, load_format: str) -> tuple[str, str] | None:
    """As the loader has it: the files that it reads, and the index that says which of them; None if it reads none."""
    if load_format == "auto":
        load_format = "mistral" if any(folder.glob(_CONSOLIDATED)) else "hf"
    if load_format == "mistral":
        return _CONSOLIDATED, "consolidated.safetensors.index.json"
    return ("*.safetensors", "model.safetensors.index.json") if load_format in _SAFETENSORS_FORMATS else None


def damage_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    """Weights that were only half written. The loader would find it, minutes later and in another process."""
    for folder, load_format in {(Path(model.model), load_format) for model, load_format in models_of(vllm_config)}:
        if (read := weight_files(folder, load_format)) is None:
            continue
        files, index = read[0], folder / read[1]
        for file in sorted(folder.glob(files)):
            try:
                with safe_open(file, "np"):
                    pass  # it compares the header with the file's length
            except (OSError, SafetensorError) as error:
                yield f"{file} is damaged or was only half written ({error}); copy the model again or name another."
        if index.is_file() and (missing := _missing_parts(index)):
            yield f"{index} names {missing}, which cannot be had; copy the model again or name another."


def _missing_parts(index: Path) -> str | None:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        return next((name for name in sorted(names) if not (index.parent / name).is_file()), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "no weights"

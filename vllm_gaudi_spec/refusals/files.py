"""Refusals of weight files: pickles, GGUF, and damaged ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from vllm_gaudi_spec.config import OTHER_MODEL, pickled_weights
from vllm_gaudi_spec.refusals.models import models_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend


# Patterns of vLLM's loader, and of other pickles.
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Formats of --load-format that are pickles, or that fall back to them.
_PICKLE_FORMATS = ("pt", "npcache")
_FALLING_BACK = ("auto", "hf")


def other_file_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    """The loader would refuse pickles too (`upstream.refuse_pickled_weights`), but later, in the engine's process. With
    GGUF it would find no weights."""
    for model, load_format in models_of(vllm_config):
        if load_format in _PICKLE_FORMATS:
            yield f"Load format {load_format} reads pickles; give models with *.safetensors, and leave it out."
        folder = Path(model.model)
        if load_format not in _FALLING_BACK or not folder.is_dir() or any(folder.glob("*.safetensors")):
            continue
        if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
            yield pickled_weights(model.model, pickles[0])
        elif gguf := sorted(path.name for path in folder.glob("*.gguf")):
            yield f"The weights of {model.model} are in GGUF ({gguf[0]}), which is not read; {OTHER_MODEL}."


_CONSOLIDATED = "consolidated*.safetensors"
# Formats of --load-format in which vLLM's loader reads files and an index of one kind; auto is one of them.
_SAFETENSORS_FORMATS = ("hf", "safetensors", "fastsafetensors", "instanttensor")


def weight_files(folder: Path, load_format: str) -> tuple[str, str] | None:
    """The pattern of the files that the loader reads, and the name of their index; None for other load formats."""
    if load_format == "auto":
        load_format = "mistral" if any(folder.glob(_CONSOLIDATED)) else "hf"
    if load_format == "mistral":
        return _CONSOLIDATED, "consolidated.safetensors.index.json"
    return ("*.safetensors", "model.safetensors.index.json") if load_format in _SAFETENSORS_FORMATS else None


def damage_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    """Of files that were only half written. The loader would fail on them too, minutes later and in another process."""
    for folder, load_format in {(Path(model.model), load_format) for model, load_format in models_of(vllm_config)}:
        if (read := weight_files(folder, load_format)) is None:
            continue
        files, index = read[0], folder / read[1]
        for file in sorted(folder.glob(files)):
            try:
                with safe_open(file, "np"):
                    pass  # the header is compared with the file's length
            except (OSError, SafetensorError) as error:
                yield f"{file} is damaged or was only half written ({error}); copy the model again or name another."
        if index.is_file() and (fault := _index_fault(index)):
            yield f"{index} {fault}; copy the model again or name another."


def _index_fault(index: Path) -> str | None:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        missing = (name for name in sorted(names) if not (index.parent / name).is_file())
        return next((f"names {name}, which is missing" for name in missing), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "names no weights"

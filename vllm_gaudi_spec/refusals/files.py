"""Checks that reject weight files: pickles, GGUF files, and damaged files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from vllm_gaudi_spec.config import OTHER_MODEL, explain_pickled_weights
from vllm_gaudi_spec.refusals.models import list_models

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend


# File patterns that vLLM's loader reads, and patterns of other pickle files.
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Values of --load-format with which pickles are read, always or as a fallback.
_PICKLE_FORMATS = ("pt", "npcache")
_FALLING_BACK = ("auto", "hf")


def other_file_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    """Yield reasons to reject models whose weights are pickles or GGUF files.

    The loader also rejects pickles (`upstream.refuse_pickled_weights`), but only later and in the engine process. It
    would not find any weights in a folder with GGUF files.
    """
    for model, load_format in list_models(vllm_config):
        if load_format in _PICKLE_FORMATS:
            yield f"--load-format {load_format} reads pickles; leave it out, and use models with *.safetensors."
        folder = Path(model.model)
        if load_format not in _FALLING_BACK or not folder.is_dir() or any(folder.glob("*.safetensors")):
            continue
        if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
            yield explain_pickled_weights(model.model, pickles[0])
        elif gguf := sorted(path.name for path in folder.glob("*.gguf")):
            yield f"The weights of {model.model} are in GGUF ({gguf[0]}), which is not supported; {OTHER_MODEL}."


# More layers than any known model has, but so few that they can be built within a minute.
_MANY_LAYERS = 1000
_CONSOLIDATED = "consolidated*.safetensors"
# Values of --load-format with which vLLM's loader reads *.safetensors and a single index file. "auto" selects one of
# these values.
_SAFETENSORS_FORMATS = ("hf", "safetensors", "fastsafetensors", "instanttensor")


def find_weight_files(folder: Path, load_format: str) -> tuple[str, str] | None:
    """Return the pattern of the files that the loader reads and the name of their index, or None for other formats."""
    if load_format == "auto":
        load_format = "mistral" if any(folder.glob(_CONSOLIDATED)) else "hf"
    if load_format == "mistral":
        return _CONSOLIDATED, "consolidated.safetensors.index.json"
    return ("*.safetensors", "model.safetensors.index.json") if load_format in _SAFETENSORS_FORMATS else None


def damage_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    """Yield reasons to reject incomplete files, which the loader would detect minutes later in another process."""
    for model, load_format in list_models(vllm_config):
        folder, num_tensors = Path(model.model), 0
        if (read := find_weight_files(folder, load_format)) is None:
            continue
        files, index = read[0], folder / read[1]
        for file in sorted(folder.glob(files)):
            try:
                if not file.is_file():  # opening a named pipe may block forever
                    raise OSError("it is not a file")
                with safe_open(file, "np") as tensors:  # compares the header with the size of the file
                    num_tensors += len(tensors.keys())
            except (OSError, SafetensorError) as error:
                yield f"{file} is damaged or incomplete ({error}); copy the model again or use another."
        if index.is_file() and (fault := _find_index_fault(index)):
            yield f"{index} {fault}; copy the model again or use another."
        num_layers = model.get_total_num_hidden_layers()
        if num_tensors and num_layers > max(num_tensors, _MANY_LAYERS):  # building this many layers might never end
            fault = f"claims {num_layers} layers, but its files have {num_tensors} tensors"
            yield f"The configuration of {folder} {fault}; copy the model again or use another."


def _find_index_fault(index: Path) -> str | None:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        missing = (name for name in sorted(names) if not (index.parent / name).is_file())
        return next((f"names {name}, which is missing" for name in missing), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "names no weights"

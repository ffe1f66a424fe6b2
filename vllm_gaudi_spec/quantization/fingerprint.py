"""A short name for the weights of a model, by which files that were measured on another one are noticed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_SAMPLE = 1 << 20
# What a copy or another version of transformers changes, and the weights do not depend on.
_VOLATILE = ("_name_or_path", "transformers_version")


def fingerprint(model: str) -> str:
    """Of a folder's configuration, and of the size, beginning and end of each file of weights; of a name on the Hugging
    Face hub what was downloaded. "" where there are no weights yet."""
    folder = folder_of(model)
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]) if folder is not None else []
    if folder is None or not weights:
        return ""
    config = json.loads((folder / "config.json").read_text())
    digest = hashlib.sha256(
        json.dumps({k: v for k, v in config.items() if k not in _VOLATILE}, sort_keys=True).encode()
    )
    for path in weights:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            digest.update(f"{path.name} {size}".encode())
            for start in (0, max(0, size - _SAMPLE)):
                file.seek(start)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:16]


def folder_of(model: str) -> Path | None:
    """A model's files: its own folder, or what was downloaded of a name on the hub."""
    if (Path(model) / "config.json").is_file():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None

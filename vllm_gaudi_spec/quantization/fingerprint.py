"""A fingerprint of a model's weights, used to detect files that were measured on a different model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_SAMPLE = 1 << 20
# Fields of the configuration that may change although the weights are the same, for example if a model is copied.
_VOLATILE = ("_name_or_path", "transformers_version")


def fingerprint(model: str) -> str:
    """Return a hash of a model's configuration and of the size, beginning, and end of each weight file.

    The result is empty if the weights are neither in a local folder nor downloaded.
    """
    folder = find_model_folder(model)
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


def find_model_folder(model: str) -> Path | None:
    """Return the local folder that contains a model's files, including downloads from the Hugging Face Hub, or None."""
    if (Path(model) / "config.json").is_file():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None

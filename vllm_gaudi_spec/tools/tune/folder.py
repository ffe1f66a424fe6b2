"""Where a calibration keeps what its steps hand to each other: a folder that any step can be run on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_gaudi_spec.quantization.files import QuantFilesError, replace, worlds
from vllm_gaudi_spec.tools.io.output_files import as_json

TARGET, DRAFT = "target", "draft"
ROLES = (TARGET, DRAFT)


@dataclass(frozen=True)
class Role:
    """The files of one of the two models. Paths to measurements are prefixes, as QUANT_CONFIG's dump_stats_path is."""

    folder: Path

    @property
    def raw(self) -> Path:
        """What the engine that runs now writes."""
        return self.folder / "raw" / "inc"

    @property
    def measured(self) -> Path:
        return self.folder / "measured" / "inc"

    @property
    def processed(self) -> Path:
        return self.folder / "processed" / "inc"

    @property
    def final(self) -> Path:
        """Measurements and scales for serving."""
        return self.folder / "inc"

    @property
    def measure_config(self) -> Path:
        return self.folder / "measure.json"

    def quant_config(self, method: str) -> Path:
        return self.folder / f"quant_{method}.json"


@dataclass(frozen=True)
class Folder:
    root: Path

    def role(self, name: str) -> Role:
        return Role(self.root / name)

    @property
    def roles(self) -> list[str]:
        """Those that were measured."""
        found = [name for name in ROLES if worlds(self.role(name).measured)]
        if not found:
            raise QuantFilesError(f"{self.root} has no measurements: {self.role(TARGET).measured.parent} is empty")
        return found

    @property
    def device(self) -> Path:
        return self.root / "device.json"

    @property
    def prompts(self) -> Path:
        return self.root / "prompts.jsonl"

    @property
    def progress(self) -> Path:
        """What was measured so far, and of what."""
        return self.root / "measured.json"


def write_json(path: Path, content: Any) -> None:
    replace(path, as_json(content))


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise QuantFilesError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise QuantFilesError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise QuantFilesError(f"{path} is no JSON object")
    return content


def fingerprint_of(prompts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()[:16]

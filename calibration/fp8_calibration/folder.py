"""The folder through which the steps of a calibration pass their results, and its QUANT_CONFIG files."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8_calibration.scales import SCALE_METHODS
from vllm_gaudi_spec.config import in_one_line
from vllm_gaudi_spec.quantization.files import QuantFilesError, Record, find_ranks, read_world, replace
from vllm_gaudi_spec.quantization.fingerprint import fingerprint
from vllm_gaudi_spec.tools.io.output import FINE, INTERRUPTED, PROBLEMS, as_json

TARGET, DRAFT = "target", "draft"
ROLES = (TARGET, DRAFT)
MODEL_OPTIONS = {TARGET: "model", DRAFT: "draft"}
"""Maps the roles to the options of steps that name their models."""


@dataclass
class Role:
    """Paths to the files of one model. Measurements have prefixes, as in QUANT_CONFIG's dump_stats_path."""

    folder: Path

    def __post_init__(self) -> None:
        self.raw = self.folder / "raw" / "inc"  # written by the running engine
        self.measured = self.folder / "measured" / "inc"
        self.processed = self.folder / "processed" / "inc"
        self.final = self.folder / "inc"  # with the scales that an engine serves with
        self.measure_config = self.folder / "measure.json"

    def quant_config(self, method: str) -> Path:
        return self.folder / f"quant_{method}.json"


@dataclass
class Folder:
    root: Path

    def __post_init__(self) -> None:
        self.device = self.root / "device.json"
        self.prompts = self.root / "prompts.jsonl"
        # Which prompts were measured, with which models and settings.
        self.progress = self.root / "measured.json"

    def role(self, name: str) -> Role:
        return Role(self.root / name)

    @property
    def roles(self) -> list[str]:
        """The roles that have measurements."""
        found = [name for name in ROLES if find_ranks(self.role(name).measured)]
        if not found:
            raise QuantFilesError(f"{self.root} has no measurements: {self.role(TARGET).measured.parent} is empty")
        return found


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
        raise QuantFilesError(f"{path} is not a JSON object")
    return content


def write_prompts(folder: Folder, prompts: Sequence[str]) -> None:
    lines = "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in prompts)
    replace(folder.prompts, lines.encode())


def read_measurements(prefix: Path, world: int | None, model: str | None) -> list[Record]:
    """Read the measurements of all ranks, and make sure that they are of the model, if one is named."""
    records = read_world(prefix, world)
    expected = fingerprint(model) if model else ""
    if expected and records[0].model and records[0].model != expected:
        raise QuantFilesError(f"{prefix} was measured on a different model than {model}")
    return records


def run_step(name: str, step: Callable[[], None], *, verbose: bool = False) -> int:
    """Run a step of a calibration, report an error in one line, and return the exit status."""
    try:
        step()
    except KeyboardInterrupt:
        print(f"{name}: interrupted; run it again to continue", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if verbose:
            raise
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        print(f"{name}: error: {kind}{in_one_line(error)}", file=sys.stderr, flush=True)
        return PROBLEMS
    return FINE


def hash_prompts(prompts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()[:16]


# ---- QUANT_CONFIG files, as Intel Neural Compressor reads them ----------------------------------------------


MEASURING_EXTENSION = "fp8_calibration.observers.Extension"
"""The `worker_extension_cls` of an engine that measures, for devices without Intel Neural Compressor."""


def measuring_config(prefix: Path) -> dict[str, Any]:
    """Return the QUANT_CONFIG of an engine that measures into files with this prefix."""
    return _make_config(prefix, [], mode="MEASURE")


def serving_config(prefix: Path, method: str, exclude: Sequence[str], unseen: Sequence[str]) -> dict[str, Any]:
    """Return the QUANT_CONFIG of an engine that serves; unseen and excluded modules keep their precision."""
    patterns = [*exclude, *(f"^{re.escape(name)}$" for name in unseen)]
    scale_format = "const" if SCALE_METHODS[method].weight_per_channel else "scalar"
    return _make_config(prefix, patterns, mode="QUANTIZE", scale_method=method, scale_format=scale_format)


def _make_config(prefix: Path, exclude: Sequence[str], **options: str) -> dict[str, Any]:
    return {
        "method": "HOOKS",
        "observer": "maxabs",
        "allowlist": {"types": [], "names": []},
        "blocklist": {"types": [], "names": list(exclude)},
        "dump_stats_path": str(prefix.absolute()),
        **options,
    }

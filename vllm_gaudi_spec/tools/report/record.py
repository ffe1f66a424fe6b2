"""The record of a run: a versioned JSON object, which a comparison writes and a report reads."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_gaudi_spec import versions
from vllm_gaudi_spec.environment import list_set_variables

FORMAT = "vllm-gaudi-spec run"
VERSION = 4
_PACKAGES = ("vllm-gaudi-spec", "torch", "transformers", "habana-torch-plugin", "torch-npu")


class RecordError(ValueError):
    """Raised for a file that is not a readable record. The message is in one line and contains the file name."""


def read_environment() -> dict[str, str]:
    """Return the documented variables that are set. Call this before a run, which sets some variables."""
    return {variable.name: value for variable, value in list_set_variables().items()}


def make(
    command: Sequence[str],
    environment: dict[str, str],
    device: dict[str, str],
    settings: dict[str, Any],
    measurement: dict[str, Any],
    tasks: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Create the record of a run. `measurement` has the number of turns and, if engines ran one by one, the reason."""
    found = {"python": platform.python_version(), "vllm": versions.installed_vllm()}
    found |= {name: versions.installed(name) for name in _PACKAGES}
    return {
        "format": FORMAT,
        "version": VERSION,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "environment": environment,
        "versions": {name: version for name, version in found.items() if version is not None},
        "device": device,
        "settings": settings,
        "measurement": measurement,
        "tasks": tasks,
    }


def is_record(path: str | Path) -> bool:
    """Whether the path is a regular file that contains a record of any version."""
    try:
        found = json.loads(Path(path).read_text()) if Path(path).is_file() else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror or error}; use a file that --json wrote") from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is not JSON ({error}); use a file that --json wrote") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RecordError(f"{path} is not the record of a run; use a file that `gaudi-spec demo --json FILE` wrote")
    if found.get("version") != VERSION:
        raise RecordError(
            f"{path} is a record of version {found.get('version')}, but this release reads version {VERSION}; "
            "record the run again with this release"
        )
    return found


# ---- figures in a record, as shown in the table and on the page ---------------------------------------------


def compute_acceptance_length(task: dict[str, Any]) -> float:
    """Return the mean number of tokens per step with drafts, as in vLLM's metric, or 1 if there were no drafts."""
    return 1 + task["num_accepted_tokens"] / task["num_drafts"] if task["num_drafts"] else 1.0


def describe_measurement(measurement: dict[str, Any]) -> str:
    """Describe in one sentence how speeds were measured."""
    turns, reason = measurement["turns"], measurement["why_one_by_one"]
    count = "once" if turns == 1 else f"{turns} times"
    if reason is not None:
        return f"Each prompt was run {count}, one task after the other, because {reason}."
    return f"Each prompt was run {count}, by all tasks within seconds of each other, in alternating order."

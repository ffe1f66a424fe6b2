"""The record of a run: one JSON object with a version, made here, and checked here when it is read again.

{"format", "version", "made", "command", "environment", "versions", "device", "settings", "measurement", "tasks"}; a
task has the figures that SHAPE names, and more. `answers` has each prompt, the answer in pieces, one per token, and for
each step of the target the number of its tokens and how many of these were drafts.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_gaudi_spec import versions
from vllm_gaudi_spec.environment import set_variables

FORMAT = "vllm-gaudi-spec run"
VERSION = 3
_PACKAGES = ("vllm-gaudi-spec", "torch", "transformers", "habana-torch-plugin", "torch-npu")


class RecordError(ValueError):
    """A file is not a readable record; the message is one line and names the file."""


def environment() -> dict[str, str]:
    """Return the variables of our table that are set. Call it before a run, which sets some itself."""
    return {variable.name: value for variable, value in set_variables().items()}


def make(
    command: Sequence[str],
    environment: dict[str, str],
    device: dict[str, str],
    settings: dict[str, Any],
    measurement: dict[str, Any],
    tasks: dict[str, dict[str, Any]],
) -> dict[str, Any]:
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


def mean_acceptance_length(task: dict[str, Any]) -> float:
    """vLLM's metric, over steps with drafts: the accepted drafts and one token more. 1 where nothing was drafted."""
    return 1 + task["num_accepted_tokens"] / task["num_drafts"] if task["num_drafts"] else 1.0


def how_measured(measurement: dict[str, Any]) -> str:
    """Describe in a sentence how the speeds were measured."""
    turns, apart = measurement["turns"], measurement["why_one_by_one"]
    count = "once" if turns == 1 else f"{turns} times"
    if apart is not None:
        return (
            f"Each prompt was run {count}, one task after the other, because {apart}: a busy machine moves the "
            "speedups."
        )
    return (
        f"Each prompt was run {count}, by all tasks in turns within seconds, in alternating order, while the other "
        "engines waited."
    )


def is_record(path: str | Path) -> bool:
    """Whether a file is a record, of any version, whole or not. A pipe is none: reading it would block."""
    try:
        found = json.loads(Path(path).read_text()) if Path(path).is_file() else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror or error}; give the file that --json wrote") from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is not JSON ({error}); give the file that --json wrote") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RecordError(f"{path} is no record of a run; give a file that `gaudi-spec demo --json FILE` wrote")
    if found.get("version") != VERSION:
        raise RecordError(
            f"{path} is a record of version {found.get('version')}, and this release reads {VERSION}; "
            "make it again with this release"
        )
    try:
        _check(found, SHAPE, "")
        _check_answers(found)
    except _Mismatch as mismatch:
        raise RecordError(f"{path} is damaged: {mismatch}; make it again") from None
    return found


# ---- what a record looks like ----------------------------------------------------------------------------

_NUMBER = (int, float)
_MAYBE = type(None)
_STEP = {
    "requests": int,
    "tokens": int,
    "seconds": _NUMBER,
    "parts": [{"part": str, "start": _NUMBER, "end": _NUMBER}],
}
SHAPE: dict[str, Any] = {
    "made": str,
    "command": [str],
    "environment": {str: str},
    "versions": {str: str},
    "device": {"device": str, "mode": str},
    "settings": {"model": str, "dtype": str, "osl": int, "batch_size": int, "temperature": _NUMBER},
    "measurement": {"turns": int, "why_one_by_one": (str, _MAYBE)},
    "tasks": {
        str: {
            "k": int,
            "tokens_per_s": _NUMBER,
            "latency_s": _NUMBER,
            "seconds": [[_NUMBER]],
            "latencies": [[{"ttft": _NUMBER, "tpot": (*_NUMBER, _MAYBE), "itl": (*_NUMBER, _MAYBE)}]],
            "step": (_STEP, _MAYBE),
            "speedup": ({"ratio": _NUMBER, "low": _NUMBER, "high": _NUMBER}, _MAYBE),
            "tokens_per_step": _NUMBER,
            "acc_rate": (*_NUMBER, _MAYBE),
            "acc_counts": [int],
            "num_drafts": int,
            "num_draft_tokens": int,
            "num_accepted_tokens": int,
            "accepted_lengths": [int],
            "draft_model": (str, _MAYBE),
            "matches_baseline": ({str: int}, _MAYBE),
            "graphs": {"warmup": int, "after_warmup": int},
            "compiled_after_warmup": (int, _MAYBE),
            "steps": int,
            "host_syncs_per_step": _NUMBER,
            "answers": [{"prompt": str, "pieces": [str], "steps": [[int]]}],
        }
    },
}


class _Mismatch(Exception):
    pass


def _check(value: Any, shape: Any, path: str) -> None:
    """A type, a list of one shape, an object with these names and maybe more, or with any names; or one of several.
    Numbers are figures: none is negative, or not a number."""
    if isinstance(shape, tuple):
        if not any(_fits(value, one, path) for one in shape):
            raise _Mismatch(f"{path} is {_shortened(value)}")
    elif isinstance(shape, list):
        _expect(isinstance(value, list), value, path)
        for number, item in enumerate(value):
            _check(item, shape[0], f"{path}[{number}]")
    elif isinstance(shape, dict):
        _expect(isinstance(value, dict), value, path)
        expected = dict.fromkeys(value, shape[str]) if str in shape else shape
        for name, inner in expected.items():
            inner_path = f"{path}.{name}" if path else name
            if name not in value:
                raise _Mismatch(f"{inner_path} is missing")
            _check(value[name], inner, inner_path)
    else:
        is_sane = not isinstance(value, bool) and not (
            isinstance(value, int | float) and not 0 <= value <= sys.float_info.max
        )
        _expect(isinstance(value, shape) and is_sane, value, path)


def _fits(value: Any, shape: Any, path: str) -> bool:
    try:
        _check(value, shape, path)
    except _Mismatch:
        return False
    return True


def _expect(holds: bool, value: Any, path: str) -> None:
    if not holds:
        raise _Mismatch(f"{path} is {_shortened(value)}")


def _shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _check_answers(found: dict[str, Any]) -> None:
    # The page repeats them in a command for a shell.
    if strange := [name for name in found["environment"] if not (name.isascii() and name.isidentifier())]:
        raise _Mismatch(f"environment has {_shortened(strange[0])}, which is no variable's name")
    if not found["tasks"]:
        raise _Mismatch("tasks has none")
    for name, task in found["tasks"].items():
        if len(task["acc_counts"]) != task["k"] or len(task["accepted_lengths"]) != task["k"] + 1:
            raise _Mismatch(f"tasks.{name} has other numbers of positions than k = {task['k']}")
        if task["speedup"] is not None and "baseline" not in found["tasks"]:
            raise _Mismatch(f"tasks.{name}.speedup is over a baseline that is not there")
        for number, answer in enumerate(task["answers"]):
            steps = answer["steps"]
            if any(len(step) != 2 or not 0 <= step[1] <= step[0] for step in steps):
                raise _Mismatch(f"tasks.{name}.answers[{number}].steps are no pairs of tokens and drafts among them")
            if sum(step[0] for step in steps) != len(answer["pieces"]):
                raise _Mismatch(f"tasks.{name}.answers[{number}] has other tokens than its steps brought")

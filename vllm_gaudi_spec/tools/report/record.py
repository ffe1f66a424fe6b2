"""The record of a run: one JSON object, made by a comparison and validated when it is read again."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from vllm_gaudi_spec import versions
from vllm_gaudi_spec.environment import list_set_variables

FORMAT = "vllm-gaudi-spec run"
VERSION = 4
_PACKAGES = ("vllm-gaudi-spec", "torch", "transformers", "habana-torch-plugin", "torch-npu")


class RecordError(ValueError):
    """A file is not a readable record; the message is one line and names the file."""


# ---- the shape of a record, in which further keys are allowed -----------------------------------------------

Count = Annotated[int, Field(ge=0, lt=2**63)]
Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Answer(TypedDict):
    prompt: str
    pieces: list[str]
    """The text that each token added."""
    steps: list[Annotated[list[Count], Field(min_length=2, max_length=2)]]
    """Number of tokens, and of accepted drafts among them, of each step of the target."""


class Latency(TypedDict):
    """Seconds, as vLLM's benchmark defines them."""

    ttft: Figure
    tpot: Figure | None
    itl: Figure | None


class Speedup(TypedDict):
    ratio: Figure
    low: Figure
    high: Figure


class Graphs(TypedDict):
    warmup: Count
    after_warmup: Count


class Task(TypedDict):
    k: Count
    tokens_per_s: Figure
    latencies: list[list[Latency]]
    """Latencies by turn and answer."""
    speedup: Speedup | None
    tokens_per_step: Figure
    acc_rate: Figure | None
    acc_counts: list[Count]
    num_drafts: Count
    num_draft_tokens: Count
    num_accepted_tokens: Count
    accepted_lengths: list[Count]
    """Number of steps with drafts that accepted 0, 1, ... k of them."""
    draft_model: str | None
    matches_baseline: dict[str, Count] | None
    graphs: Graphs
    compiled_after_warmup: Count | None
    steps: Count
    host_syncs_per_step: Figure
    answers: list[Answer]


class Device(TypedDict):
    device: str
    mode: str


class Settings(TypedDict):
    model: str
    dtype: str
    osl: Count
    batch_size: Count
    temperature: Figure


class Measurement(TypedDict):
    turns: Count
    why_one_by_one: str | None
    """The reason why engines did not run side by side, or None if they did."""


class Record(TypedDict):
    made: str
    command: list[str]
    # The page repeats these variables in a command for a shell.
    environment: dict[Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")], str]
    versions: dict[str, str]
    device: Device
    settings: Settings
    measurement: Measurement
    tasks: Annotated[dict[str, Task], Field(min_length=1)]


def _check_sums(record: dict[str, Any]) -> None:
    for name, task in record["tasks"].items():
        if len(task["acc_counts"]) != task["k"] or len(task["accepted_lengths"]) != task["k"] + 1:
            raise RecordError(f"tasks.{name}: the number of positions is not k = {task['k']}")
        if task["speedup"] is not None and "baseline" not in record["tasks"]:
            raise RecordError(f"tasks.{name}.speedup needs a baseline")
        for answer in task["answers"]:
            steps = answer["steps"]
            num_tokens = sum(tokens for tokens, _ in steps)
            if num_tokens != len(answer["pieces"]) or any(drafts > tokens for tokens, drafts in steps):
                raise RecordError(f"tasks.{name}.answers: the steps do not add up to the tokens of the answer")


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


def read_environment() -> dict[str, str]:
    """Return the documented variables that are set. Call it before a run, which sets some itself."""
    return {variable.name: value for variable, value in list_set_variables().items()}


def is_record(path: str | Path) -> bool:
    """Whether a regular file is a record of any version."""
    try:
        found = json.loads(Path(path).read_text()) if Path(path).is_file() else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror or error}; give a file that --json wrote") from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is not JSON ({error}); give a file that --json wrote") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RecordError(f"{path} is not the record of a run; give a file that `gaudi-spec demo --json FILE` wrote")
    if found.get("version") != VERSION:
        raise RecordError(
            f"{path} is a record of version {found.get('version')}, but this release reads version {VERSION}; "
            "make the record again with this release"
        )
    try:
        TypeAdapter(Record).validate_python(found, strict=True)
        _check_sums(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RecordError(f"{path} is damaged: {where}: {first['msg']}; make it again") from None
    except RecordError as error:
        raise RecordError(f"{path} is damaged: {error}; make it again") from None
    return found


# ---- figures of a record, as the table and the page show them ----------------------------------------------


def mean_acceptance_length(task: dict[str, Any]) -> float:
    """Return the mean number of tokens per step with drafts, as in vLLM's metric; 1 if nothing was drafted."""
    return 1 + task["num_accepted_tokens"] / task["num_drafts"] if task["num_drafts"] else 1.0


def describe_measurement(measurement: dict[str, Any]) -> str:
    """Describe in a sentence how the speeds were measured."""
    turns, apart = measurement["turns"], measurement["why_one_by_one"]
    count = "once" if turns == 1 else f"{turns} times"
    if apart is not None:
        return (
            f"Each prompt was run {count}, one task after the other, because {apart}. A busy machine distorts such "
            "speedups."
        )
    return (
        f"Each prompt was run {count}. Within a turn, all tasks answered it within seconds of each other, in "
        "alternating order, while the other engines waited."
    )

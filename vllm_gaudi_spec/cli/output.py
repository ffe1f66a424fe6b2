"""What all commands have in common: JSON where it is asked for, errors in one line, an environment to run in."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from vllm_gaudi_spec.environment import environment_value
from vllm_gaudi_spec.terminal import until_nobody_reads

STDOUT = "-"
FINE, PROBLEMS, USAGE = 0, 1, 2
"""Exit statuses."""


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help=f"write {what} to FILE; without FILE, or with -, print it in place of everything else",
    )


def json_mistake(where: str | None) -> str | None:
    if where in (None, STDOUT):
        return None
    file = Path(str(where)).absolute()
    if not file.parent.is_dir():
        return f"there is no folder {file.parent} for --json; make it first"
    if file.is_dir():
        return f"--json {where} is a folder; name a file"
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        return f"--json {where} can not be written; name another file"
    return None


class NotWritten(Exception):
    """The message says why."""


def guarded(command: str, work: Callable[[], int]) -> int:
    """`work` and its exit status, with what may end each command as one line."""
    try:
        return until_nobody_reads(work)
    except NotWritten as error:
        return fail(command, str(error), PROBLEMS)
    except KeyboardInterrupt:
        return fail(command, "interrupted", 130)


def write_json(value: Any, where: str | None) -> None:
    if where == STDOUT:
        print(json.dumps(value, indent=2), flush=True)
    elif where is not None:
        try:
            Path(where).write_text(json.dumps(value, indent=2) + "\n")
        except OSError as error:
            raise NotWritten(f"--json {where} can not be written: {error.strerror or error}") from None


def fail(command: str, message: str, status: int = USAGE) -> int:
    print(f"gaudi-spec {command}: error: {message}", file=sys.stderr, flush=True)
    return status


def model_mistake(*models: object) -> str | None:
    """A folder that is not there; what is no folder's name is taken for a Hugging Face id."""
    for model in models:
        if isinstance(model, str) and model.startswith(("/", ".", "~")) and not Path(model).is_dir():
            return f"there is no model folder {model}; give a folder or a Hugging Face id"
    return None


def python(module: str, values: dict[str, str], arguments: list[str]) -> list[str]:
    """A module of ours in an environment of its own from the start: torch and vLLM read theirs when they are loaded,
    and this package leaves reading them to environment.py. -P: as for console scripts, the current folder is no place
    for modules."""
    return [
        "env",
        *(f"{name}={value}" for name, value in values.items()),
        sys.executable,
        "-P",
        "-m",
        module,
        *arguments,
    ]


def unless_set(**values: str) -> dict[str, str]:
    return {name: value for name, value in values.items() if environment_value(name) is None}


def become(words: list[str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(words[0], words)

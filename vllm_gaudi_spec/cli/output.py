"""What all commands have in common: JSON where it is asked for, errors in one line, an environment to run in."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from vllm_gaudi_spec.config import environment_value

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
    folder = Path(str(where)).absolute().parent
    return None if folder.is_dir() else f"there is no folder {folder} for --json; make it first"


def write_json(value: Any, where: str | None) -> None:
    if where == STDOUT:
        print(json.dumps(value, indent=2), flush=True)
    elif where is not None:
        Path(where).write_text(json.dumps(value, indent=2) + "\n")


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
    and this package leaves reading the environment to config.py."""
    return ["env", *(f"{name}={value}" for name, value in values.items()), sys.executable, "-m", module, *arguments]


def unless_set(**values: str) -> dict[str, str]:
    return {name: value for name, value in values.items() if environment_value(name) is None}


def become(words: list[str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(words[0], words)

"""What all commands have in common: errors in one line, exit statuses, an environment to run in."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from vllm_gaudi_spec.environment import is_set
from vllm_gaudi_spec.tools.io.output_files import NotWritten
from vllm_gaudi_spec.tools.io.terminal import until_nobody_reads

FINE, PROBLEMS, USAGE = 0, 1, 2
"""Exit statuses."""


_REQUIRED = ("jinja2", "numpy", "prometheus_client", "rich", "shtab")
"""What pyproject.toml requires. Of other packages the name to import need not be the name to install."""


def guarded(command: str, work: Callable[[], int], *, verbose: bool = False) -> int:
    """`work` and its exit status, with what may end each command as one line; `verbose`: a missing package
    raises, with its traceback."""
    try:
        return until_nobody_reads(work)
    except NotWritten as error:
        return fail(command, str(error), PROBLEMS)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if verbose or package in ("", "vllm_gaudi_spec"):  # our own mistake
            raise
        return fail(command, f"{package} is not installed; {_how_to_get(package)}", PROBLEMS)
    except KeyboardInterrupt:
        return fail(command, "interrupted", 130)


def _how_to_get(package: str) -> str:
    from vllm_gaudi_spec.devices import EMULATOR, GET_EMULATOR, comes_with_an_image

    if comes_with_an_image(package):
        return "use the card's vendor's image, which has it"
    if package == EMULATOR:
        return GET_EMULATOR
    return "run `make setup`" + (f", or pip install {package}" if package in _REQUIRED else "")


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
    and this package leaves reading them to environment/. -P: as for console scripts, modules are
    not searched for in the current folder."""
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
    return {name: value for name, value in values.items() if not is_set(name)}


def become(words: list[str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(words[0], words)

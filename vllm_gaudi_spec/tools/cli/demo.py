"""`gaudi-spec demo`: its options, and the environment in which it compares speculation methods."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_gaudi_spec import versions
from vllm_gaudi_spec.environment import OPENMP
from vllm_gaudi_spec.tools.compare import tasks as comparison
from vllm_gaudi_spec.tools.compare.tasks import COMPARE, tasks_of
from vllm_gaudi_spec.tools.io.output import become, fail, model_mistake, python, unless_set

DESCRIPTION = f"""\
Run the demo model with and without speculation, print one table, and write a report page with the texts.

Examples:
  gaudi-spec demo
  gaudi-spec demo --task ngram suffix --batch-size 4

{comparison.DESCRIPTION}"""
FOLDER = Path(".demo")
# The speedup is largest at concurrency 1; few prompts keep the demo short.
DEFAULTS: dict[str, Any] = {
    "task": [COMPARE],
    "osl": 64,
    "batch_size": 1,
    "num_spec_tokens": 3,
    "turns": 3,
    "json": str(FOLDER / "run.json"),
    "report": FOLDER / "report.html",
}
NUM_PROMPTS = 4


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="compare speculation methods on one model; table and report page",
        description=DESCRIPTION,
    )
    comparison.add_to(parser, num_prompts=f"default: {NUM_PROMPTS}")
    parser.set_defaults(**DEFAULTS)


def start(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Check the options before anything heavy is loaded, then start the engines."""
    options.tasks = tasks_of(options)
    mistake = comparison.contradiction_in(options) or model_mistake(options.model, options.draft_model)
    mistake = mistake or versions.vllm_mistake() or make_folder(options) or comparison.file_mistake(options)
    return fail("demo", mistake) if mistake else become(command(options, arguments))


def make_folder(options: argparse.Namespace) -> str | None:
    """Make the default folder; a user's has to exist."""
    if any(getattr(options, name) == DEFAULTS[name] for name in ("json", "report")):
        try:
            FOLDER.mkdir(exist_ok=True)
        except OSError as error:
            return f"the folder {FOLDER} cannot be made here: {error.strerror}; give --json FILE and --report FILE"
    return None


def command(options: argparse.Namespace, arguments: Sequence[str]) -> list[str]:
    user_arguments = list(arguments[1:])
    defaults = [*("--num-prompts", str(NUM_PROMPTS))] if not (options.prompts or options.num_prompts) else []
    for name, value in DEFAULTS.items():
        if getattr(options, name) != value:
            continue  # the user's own stands among the arguments
        defaults += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    values = unless_set(
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_LOGGING_STREAM="ext://sys.stderr",  # stdout is for the table
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        # Engines are forked from a process that has it already, which is faster than the platform's own way.
        **({"LD_PRELOAD": str(OPENMP), "KMP_BLOCKTIME": "1"} if OPENMP.exists() else {}),
    )
    return python("vllm_gaudi_spec.tools.compare", values, [*defaults, *user_arguments])

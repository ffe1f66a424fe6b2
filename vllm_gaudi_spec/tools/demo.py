"""`gaudi-spec demo`: its options, and the environment in which it compares speculation methods."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_gaudi_spec import versions
from vllm_gaudi_spec.environment import OPENMP
from vllm_gaudi_spec.tools.compare import tasks as comparison
from vllm_gaudi_spec.tools.io.output import fail, find_model_mistake, run_module, unless_set

DESCRIPTION = f"""\
Run the demo model with and without speculation, print a table, and write a report page with the texts.

Examples:
  gaudi-spec demo
  gaudi-spec demo --task ngram suffix --batch-size 4

{comparison.DESCRIPTION}"""
FOLDER = Path(".demo")
# The speedup is largest at concurrency 1, and a small number of prompts keeps the demo short.
DEFAULTS: dict[str, Any] = {
    "task": [comparison.COMPARE],
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
        help="compare speculation methods on one model, with a table and a report page",
        description=DESCRIPTION,
    )
    comparison.add_to(parser, num_prompts=f"default: {NUM_PROMPTS}")
    parser.set_defaults(**DEFAULTS)


def start(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Check the options before anything expensive is loaded, and then start the engines."""
    options.tasks = comparison.list_tasks(options)
    mistake = find_model_mistake(options.model, options.draft_model) or versions.explain_unusable_vllm()
    mistake = mistake or make_folder(options) or comparison.find_mistake(options)
    if mistake:
        return fail("demo", mistake)
    variables = unless_set(
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_LOGGING_STREAM="ext://sys.stderr",  # stdout is reserved for the table
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        # Preload OpenMP, because engines are forked from this process and each of them would otherwise have to load it.
        **({"LD_PRELOAD": str(OPENMP), "KMP_BLOCKTIME": "1"} if OPENMP.exists() else {}),
    )
    return run_module("vllm_gaudi_spec.tools.compare.run", variables, add_defaults(options, arguments[1:]))


def make_folder(options: argparse.Namespace) -> str | None:
    """Create the default folder, and return a message if that fails. A folder from the user must already exist."""
    if any(getattr(options, name) == DEFAULTS[name] for name in ("json", "report")):
        try:
            FOLDER.mkdir(exist_ok=True)
        except OSError as error:
            return f"the folder {FOLDER} cannot be created here: {error.strerror}; pass --json FILE and --report FILE"
    return None


def add_defaults(options: argparse.Namespace, arguments: Sequence[str]) -> list[str]:
    """Insert the demo's defaults before the user's arguments."""
    defaults = [] if options.prompts or options.num_prompts else ["--num-prompts", str(NUM_PROMPTS)]
    for name, value in DEFAULTS.items():
        if getattr(options, name) == value:
            defaults += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    return [*defaults, *arguments]

"""The tasks of a comparison, and its options. This module imports nothing expensive."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_gaudi_spec.config import UNIVERSAL_DRAFT
from vllm_gaudi_spec.methods import DFLASH, DRAFT_MODEL, EAGLE3, METHODS, RULES, Method
from vllm_gaudi_spec.tools.io import output
from vllm_gaudi_spec.tools.io.command_line import add_shared, not_negative, positive, share
from vllm_gaudi_spec.tools.io.prompts import SOURCES

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
    "San Francisco is know for its",  # spelled as in the prompt set that was used for published figures
    "Facebook was created in 2004 by",
    "Curious George is a",
    "Python 3.11 brings improvements to its",
]


@dataclass(frozen=True)
class Task:
    method: str | None
    """vLLM's name for the method, or None for the baseline."""
    options: tuple[str, ...] = ()
    """Options of the command that vLLM accepts under the same name."""
    needs_draft_model: bool = False
    parallel_drafting: bool = False
    """Whether the draft model generates all drafts in one forward pass."""
    remembers_answers: bool = False
    """Whether the method uses the tokens of finished requests. If so, a second turn would give different results."""
    demo_drafter: str | None = None
    """The folder with the demo's drafter, under demo/."""
    demo_target: str | None = None
    """The folder under demo/ that contains the demo's target, or None if the target is the demo model."""
    demo_drafts: int | None = None
    """Maximum number of drafts that the demo's drafter supports, if it has a limit."""


BASELINE = "baseline"
_DEMOS: dict[str, dict[str, Any]] = {
    DRAFT_MODEL: {"demo_drafter": "draft-same-vocab"},
    UNIVERSAL_DRAFT: {"demo_drafter": "draft-other-vocab"},
    "eagle": {"demo_drafter": "eagle-head"},
    EAGLE3: {"demo_drafter": "tiny/eagle3", "demo_target": "tiny/target"},
    DFLASH: {"demo_drafter": "tiny/dflash", "demo_target": "tiny/target", "demo_drafts": 8},
    "medusa": {"demo_drafter": "tiny/medusa", "demo_target": "tiny/target", "demo_drafts": 4},
    "mtp": {"demo_target": "tiny/mtp"},
}
_OPTIONS_OF_COMMAND = ("prompt_lookup_min", "prompt_lookup_max")


def _task(name: str, row: Method) -> Task:
    return Task(
        name,
        tuple(option for option in _OPTIONS_OF_COMMAND if option in row.options),
        needs_draft_model=row.has_model and not row.in_target,
        remembers_answers=row.remembers_requests,
        **_DEMOS.get(name, {}),
    )


TASKS = {
    BASELINE: Task(None),
    # custom_class is left out, because it requires a user-defined class.
    **{name: _task(name, row) for name, row in METHODS.items() if "model" not in row.options},
    UNIVERSAL_DRAFT: _task(UNIVERSAL_DRAFT, METHODS[DRAFT_MODEL]),
    "peagle": replace(_task(EAGLE3, METHODS[EAGLE3]), parallel_drafting=True, demo_drafter="tiny/peagle"),
}
COMPARE = "compare"
COMPARED = (BASELINE, "ngram", DRAFT_MODEL, UNIVERSAL_DRAFT)
DEMO = Path(__file__).parents[2] / "demo"
"""The drafters for the demo model, which are links to demo/ in a checkout and folders in a wheel."""
_RULES = [rule for rule in RULES if rule != "synthetic"]
_DRAFTING = ("greedy", "probabilistic", "coupled")


def make_speculative_config(name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the `speculative_config` of a task for vLLM."""
    task = TASKS[name]
    if task.method is None:
        return None
    max_drafts = task.demo_drafts if uses_demo_drafter(name, options) else None
    config = {"method": task.method, "num_speculative_tokens": min(options.num_spec_tokens, max_drafts or sys.maxsize)}
    config |= {name: getattr(options, name) for name in task.options}
    if task.parallel_drafting:
        config["parallel_drafting"] = True
    if task.needs_draft_model:
        config["model"] = find_draft_model(name, options)
    for choice in options.acceptance or ():
        config["rejection_sample_method" if choice in _RULES else "draft_sample_method"] = choice
    return config


def find_draft_model(name: str, options: argparse.Namespace) -> str | None:
    """Return the demo's drafter if the user did not name a model; otherwise, return the user's draft model."""
    drafter = TASKS[name].demo_drafter
    return str(DEMO / drafter) if drafter and uses_demo_drafter(name, options) else options.draft_model


def uses_demo_drafter(name: str, options: argparse.Namespace) -> bool:
    return not (options.draft_model or options.model) and TASKS[name].demo_drafter is not None


def find_demo_targets(options: argparse.Namespace) -> set[str | None]:
    """Return the targets of all tasks that draft, in which None represents the demo model."""
    drafting = [TASKS[name] for name in options.tasks if TASKS[name].method is not None]
    return {task.demo_target for task in drafting} or {None}


def list_tasks(options: argparse.Namespace) -> list[str]:
    """Return each task once. If there are several, the baseline is first."""
    compared = [name for name in COMPARED if find_draft_model(name, options) or not TASKS[name].needs_draft_model]
    asked = [name for task in options.task for name in (compared if task == COMPARE else [task])]
    return list(dict.fromkeys(asked if len(set(asked)) == 1 else [BASELINE, *asked]))


# ---- options -----------------------------------------------------------------------------------------------


DESCRIPTION = """\
Several tasks are compared in one table with the baseline (no speculation). `compare` stands for baseline, ngram,
draft_model and universal_draft, a draft model with another vocabulary.
On the CPU, the engines run side by side and take turns, prompt by prompt, so a slow minute of the machine slows all of
them. On a card, when memory is short, and with --do-profile, they run one after the other; the table says so.

Without --model, the target is the demo model, and --draft may be left out, because the demo model's drafters come with
this package. For eagle3, peagle, dflash, medusa and mtp, the demo uses a tiny model, whose texts are poor but whose
acceptance is high. With your own model and no --draft, `compare` leaves out the methods that need a drafter; mtp drafts
with the model itself.

The drafters of the demo model were trained on the fixed prompts, so their acceptance rate is lower on your own
--prompts.

Exit status: 0 when the task ran and met its threshold, 1 when it failed (the last line has the reason), 2 for invalid
options.
"""


def add_to(parser: argparse.ArgumentParser, num_prompts: str = "default: as --batch-size") -> None:
    """Add the options of a comparison. `num_prompts` describes the default of `--num-prompts`."""
    add = parser.add_argument
    add(
        "--task",
        nargs="+",
        default=["baseline"],
        choices=[*TASKS, COMPARE],
        metavar="TASK",
        help=f"one or more speculation methods to compare: {', '.join(TASKS)}; {COMPARE} means {', '.join(COMPARED)}",
    )
    add("--model", metavar="MODEL", help="folder or Hugging Face id of the target (default: the demo model)")
    add_shared(
        add,
        "--draft",
        dest="draft_model",
        metavar="MODEL",
        help="folder or Hugging Face id of the drafter (default: the demo's, with the demo model)",
    )
    add_shared(
        add,
        "--output-len",
        dest="osl",
        type=positive,
        default=512,
        metavar="N",
        help="number of tokens to generate per prompt; end tokens are ignored",
    )
    add("--batch-size", type=positive, default=8, metavar="N", help="concurrency: number of requests in flight")
    add("--num-prompts", type=positive, metavar="N", help=f"number of prompts ({num_prompts})")
    add("--prompts", metavar="SOURCE", help=f"{SOURCES} (default: eight fixed prompts)")
    add_shared(
        add,
        "--num-speculative-tokens",
        dest="num_spec_tokens",
        type=positive,
        default=5,
        metavar="K",
        help="maximum number of drafts per step",
    )
    add("--prompt-lookup-min", type=positive, default=2, metavar="N", help="ngram: shortest match, in tokens")
    add("--prompt-lookup-max", type=positive, default=5, metavar="N", help="ngram: longest match, in tokens")
    add(
        "--acceptance",
        nargs="+",
        choices=[*_RULES, *_DRAFTING],
        metavar="HOW",
        help=f"acceptance rule ({', '.join(_RULES)}), drafting mode ({', '.join(_DRAFTING)}), or one of each "
        "(default: vLLM's, standard and greedy)",
    )
    add("--temperature", type=not_negative, default=0.0, metavar="T", help="sampling temperature; 0 is greedy")
    add("--seed", type=int, default=0, metavar="S", help="prompt i samples with seed S + i")
    add("--dtype", help="as for vllm serve (default: float32 on the CPU and emulated cards, else the model's own)")
    add("--num-warmups", type=int, default=1, metavar="N", help="short runs before the measured ones")
    add(
        "--turns",
        type=positive,
        default=1,
        metavar="N",
        help="maximum number of measured runs of each prompt (side by side, after the first two, none starts later "
        "than one minute after the first)",
    )
    add("--run-base", action="store_true", help="run the baseline as well, and compare the texts")
    output.add_json(add, "the record of the run")
    add("--report", type=Path, metavar="FILE", help="write a report page (HTML)")
    add(
        "--do-profile",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FOLDER",
        help="write torch.profiler's trace of the measured run to FOLDER; without FOLDER, to the folder of --json's "
        "file or the current one (default: no trace)",
    )
    add(
        "--assert-accept-rate",
        type=share,
        metavar="RATE",
        help="fail if the acceptance rate is below RATE, from 0 to 1 (default: no threshold)",
    )


def find_mistake(options: argparse.Namespace) -> str | None:
    """Return a message about conflicting options, or None. `options.tasks` must be the result of `list_tasks`."""
    names = " and ".join(options.tasks)
    drafting = [name for name in options.tasks if TASKS[name].needs_draft_model]
    choices = options.acceptance or []
    if options.draft_model and not drafting:
        return f"task {names} needs no draft model; leave out --draft"
    if lacking := [name for name in drafting if not find_draft_model(name, options)]:
        return f"task {lacking[0]} needs --draft"
    if all(TASKS[name].method is None for name in options.tasks):
        if choices or options.assert_accept_rate is not None:
            return f"task {names} drafts nothing; leave out --acceptance and --assert-accept-rate"
    if not options.model and len(find_demo_targets(options)) > 1:
        return f"the demo has no common target for {names}; run one at a time, or pass --model"
    if any(len([one for one in choices if one in kind]) > 1 for kind in (_RULES, _DRAFTING)):
        return "--acceptance takes at most one rule and one drafting mode"
    return output.find_mistake("--json", options.json) or output.find_mistake("--report", options.report)

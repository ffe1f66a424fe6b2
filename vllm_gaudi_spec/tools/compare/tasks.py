"""The methods that can be compared, and what each needs. Nothing heavy is imported here."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_gaudi_spec.config import UNIVERSAL_DRAFT
from vllm_gaudi_spec.drafting.table import DRAFT_MODEL, METHODS, Method
from vllm_gaudi_spec.sampling.rules.table import RULES

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
    "San Francisco is know for its",  # spelled as in the set that published figures use
    "Facebook was created in 2004 by",
    "Curious George is a",
    "Python 3.11 brings improvements to its",
]


@dataclass(frozen=True)
class Task:
    method: str | None
    """vLLM's name of the method; none for the baseline."""
    options: tuple[str, ...] = ()
    """Options of the command that go to vLLM under the same name."""
    needs_draft_model: bool = False
    remembers_answers: bool = False
    """Whether it drafts from requests that ended, so that a second turn would be another task."""
    demo_drafter: str | None = None
    """The folder under demo/ that drafts for the demo's target."""
    demo_target: str | None = None
    """The folder under demo/ that is the target, where it is not the demo model."""
    demo_drafts: int | None = None
    """The largest number of drafts of the demo's drafter, where it has a limit."""

    @property
    def was_trained_on_the_prompts(self) -> bool:
        return self.needs_draft_model and self.demo_target is None


BASELINE = "baseline"
# The demo's models, of tasks that have some.
_DEMOS: dict[str, dict[str, Any]] = {
    DRAFT_MODEL: {"demo_drafter": "draft-same-vocab"},
    UNIVERSAL_DRAFT: {"demo_drafter": "draft-other-vocab"},
    "eagle": {"demo_drafter": "eagle-head"},
    "eagle3": {"demo_drafter": "tiny/eagle3", "demo_target": "tiny/target"},
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
    # A class of the user's is not drafted with here.
    **{name: _task(name, row) for name, row in METHODS.items() if "model" not in row.options},
    UNIVERSAL_DRAFT: _task(UNIVERSAL_DRAFT, METHODS[DRAFT_MODEL]),
}
COMPARE = "compare"
COMPARED = (BASELINE, "ngram", DRAFT_MODEL, UNIVERSAL_DRAFT)
DEMO = Path(__file__).parents[2] / "demo"
"""Drafters of the demo model: in a checkout links to the folders of its demo/, in a wheel those folders."""

DRAFTING = ("greedy", "probabilistic", "coupled")


def speculative_config(name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """What the task passes to LLM(speculative_config=...)."""
    task = TASKS[name]
    if task.method is None:
        return None
    max_drafts = task.demo_drafts if uses_demo_drafter(name, options) else None
    config = {"method": task.method, "num_speculative_tokens": min(options.num_spec_tokens, max_drafts or sys.maxsize)}
    config |= {name: getattr(options, name) for name in task.options}
    if task.needs_draft_model:
        config["model"] = draft_model(name, options)
    for choice in options.acceptance or ():
        config["rejection_sample_method" if choice in RULES else "draft_sample_method"] = choice
    if options.synthetic_rates:
        config["synthetic_acceptance_rates"] = options.synthetic_rates
    return config


def draft_model(name: str, options: argparse.Namespace) -> str | None:
    """The user's, else the demo's if the target is the demo model and the task needs one."""
    drafter = TASKS[name].demo_drafter
    return str(DEMO / drafter) if drafter and uses_demo_drafter(name, options) else options.draft_model


def uses_demo_drafter(name: str, options: argparse.Namespace) -> bool:
    return not (options.draft_model or options.model) and TASKS[name].demo_drafter is not None


def demo_targets(options: argparse.Namespace) -> set[str | None]:
    """Those of the tasks that draft; None is the demo model."""
    drafting = [TASKS[name] for name in options.tasks if TASKS[name].method is not None]
    return {task.demo_target for task in drafting} or {None}


def tasks_of(options: argparse.Namespace) -> list[str]:
    """Each task once; where there are several the baseline is one of them, and the first."""
    asked = [name for task in options.task for name in (compared(options) if task == COMPARE else [task])]
    return list(dict.fromkeys(asked if len(set(asked)) == 1 else [BASELINE, *asked]))


def compared(options: argparse.Namespace) -> list[str]:
    return [name for name in COMPARED if draft_model(name, options) or not TASKS[name].needs_draft_model]

"""The report page, which shows the figures and texts of runs in one HTML file without scripts or external resources.

The page's content security policy forbids both. Texts come from models, so the template escapes them.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path, PurePath
from statistics import quantiles
from typing import Any

from vllm_gaudi_spec.config import UNIVERSAL_DRAFT
from vllm_gaudi_spec.methods import METHODS
from vllm_gaudi_spec.tools.io import output
from vllm_gaudi_spec.tools.report.record import compute_acceptance_length, describe_measurement

BASELINE = "baseline"
# Two measurements of the same configuration may differ by up to this factor.
_MIN_SPEEDUP = 1.02
_DESCRIPTIONS = {
    BASELINE: "without drafts",
    UNIVERSAL_DRAFT: "a smaller model with another vocabulary drafts",
    "peagle": "a head drafts all tokens in one pass",
    **{name: method.about for name, method in METHODS.items()},
}
# These names are the same as in vLLM's benchmark.
_LATENCIES = ("ttft", "tpot", "itl")


@dataclass(frozen=True)
class Run:
    name: str
    record: dict[str, Any]


def write(runs: Sequence[Run], path: Path) -> None:
    # A model may generate half of a surrogate pair, which cannot be encoded in a file.
    output.write("the page", path, render(runs).encode("utf-8", "replace"))


def render(runs: Sequence[Run]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    style = files(__package__).joinpath("page.css").read_text()
    environment = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    fastest = max(task["tokens_per_s"] for run in runs for task in run.record["tasks"].values())
    shown = [_describe_run(run, fastest) for run in runs]
    return environment.get_template("page.html").render(
        style=style,
        style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        title=f"Drafting on {shown[0]['model']}" if len(shown) == 1 else f"{len(shown)} runs",
        runs=shown,
    )


def _describe_run(run: Run, fastest: float) -> dict[str, Any]:
    record, settings = run.record, run.record["settings"]
    tasks = [_describe_task(name, task, record["tasks"], fastest) for name, task in record["tasks"].items()]
    answers = next(iter(record["tasks"].values()))["answers"]
    variables = [f"{shlex.quote(name)}={shlex.quote(value)}" for name, value in record["environment"].items()]
    return {
        "name": run.name,
        "model": PurePath(settings["model"]).name,
        "headline": _summarize(tasks),
        **record["device"],
        "made": record["made"].replace("+00:00", " UTC").replace("T", " ", 1),
        "measured": describe_measurement(record["measurement"]) if len(tasks) > 1 else "",
        "workload": f"{_count(len(answers), 'prompt')} of {_count(settings['osl'], 'token')}, "
        f"concurrency {settings['batch_size']}, temperature {settings['temperature']:g}",
        "tasks": tasks,
        "prompts": [_describe_prompt(number, record["tasks"]) for number in range(len(answers))],
        "command": " ".join([*variables, shlex.join(record["command"])]),
        "facts": {**{name: str(value) for name, value in settings.items()}, **record["versions"]},
    }


def _summarize(tasks: list[dict[str, Any]]) -> str:
    compared = [task for task in tasks if task["ratio"] is not None and task["k"]]
    if not compared:
        best = max(tasks, key=lambda task: float(task["tokens_per_s"]))
        return f"{best['name']}: {best['tokens_per_s']:.1f} tokens/s."
    best = max(compared, key=lambda task: float(task["ratio"]))
    plain = next(task["tokens_per_s"] for task in tasks if task["name"] == BASELINE)
    speeds = f"{best['tokens_per_s']:.1f} tokens/s, compared with {plain:.1f} without speculation."
    if best["ratio"] < _MIN_SPEEDUP:
        return f"No speedup here. The best task was {best['name']}: {speeds}"
    return f"{best['name']}: speedup {best['ratio']:.2f}, {speeds}"


def _describe_task(name: str, task: dict[str, Any], tasks: dict[str, Any], fastest: float) -> dict[str, Any]:
    speedup, matches, num_steps = task["speedup"], task["matches_baseline"], sum(task["accepted_lengths"])
    return {
        **task,
        "name": name,
        "description": _DESCRIPTIONS.get(name, ""),
        "drafter": PurePath(task["draft_model"]).name if task["draft_model"] else "",
        "bar": _percent(task["tokens_per_s"], fastest),
        "ratio": 1.0 if name == BASELINE and len(tasks) > 1 else speedup["ratio"] if speedup else None,
        "acceptance_length": compute_acceptance_length(task),
        "same_text": ", ".join(f"{number} {kind}" for kind, number in matches.items() if number) if matches else "",
        # The acceptance rate at each position 0, 1, ... k, and the number of steps that accepted that many drafts.
        "positions": [
            (number, _percent(rate, num_steps) if number else None, steps, _percent(steps, num_steps))
            for number, (rate, steps) in enumerate(zip([0, *task["acc_counts"]], task["accepted_lengths"], strict=True))
        ],
        "spreads": [_spread(task, latency) for latency in _LATENCIES],
    }


def _spread(task: dict[str, Any], name: str) -> tuple[float, ...] | None:
    """Return the quartiles of a latency in milliseconds, over all answers in all turns."""
    values = [1000 * one[name] for turn in task["latencies"] for one in turn if one[name] is not None]
    if not values:
        return None
    return tuple(quantiles(values * 2 if len(values) == 1 else values, n=4, method="inclusive"))


def _describe_prompt(number: int, tasks: dict[str, Any]) -> dict[str, Any]:
    answers = {name: task["answers"][number] for name, task in tasks.items() if number < len(task["answers"])}
    return {
        "text": next(iter(answers.values()))["prompt"],
        "answers": [
            {
                "task": name,
                "parts": _split_text(answer),
                "tokens": len(answer["pieces"]),
                "drafts": sum(drafts for _, drafts in answer["steps"]),
                "steps": len(answer["steps"]),
            }
            for name, answer in answers.items()
        ],
    }


def _split_text(answer: dict[str, Any]) -> list[tuple[str, int]]:
    """Split a text into parts, each with its number of accepted drafts, or 0 for the target's own tokens."""
    parts: list[tuple[str, int]] = []
    start = 0
    for size, drafts in answer["steps"]:
        middle, end = start + drafts, start + size
        for number, first, last in ((drafts, start, middle), (0, middle, end)):
            text = "".join(answer["pieces"][first:last])
            if text and not number and parts and not parts[-1][1]:
                parts[-1] = (parts[-1][0] + text, 0)
            elif text:
                parts.append((text, number))
        start = end
    return parts


def _percent(part: float, whole: float) -> float:
    return min(100.0, 100 * part / whole) if whole else 0.0


def _count(number: int, name: str) -> str:
    return f"{number} {name}" + ("s" if number != 1 else "")

"""The page that a person reads: figures and texts of runs, as one file that needs nothing else.

It has no script and loads nothing; its own policy forbids both. Texts come from models and are escaped by the template.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path, PurePath
from statistics import quantiles
from typing import Any, NamedTuple

from vllm_gaudi_spec.config import UNIVERSAL_DRAFT
from vllm_gaudi_spec.methods import METHODS
from vllm_gaudi_spec.tools.io import output
from vllm_gaudi_spec.tools.report.record import how_measured, mean_acceptance_length

BASELINE = "baseline"
# Two measurements of one thing differ by as much.
_MIN_SPEEDUP = 1.02
# A task in a few words, for readers who meet it for the first time.
_DESCRIPTIONS = {
    BASELINE: "without drafts",
    UNIVERSAL_DRAFT: "a smaller model with another vocabulary drafts",
    **{name: method.about for name, method in METHODS.items()},
}


# As vLLM's benchmark names them.
_LATENCIES = ("ttft", "tpot", "itl")
_PARTS = ("prepare", "forward", "verify", "draft", "report", "engine")


@dataclass(frozen=True)
class Run:
    name: str
    record: dict[str, Any]


def write(runs: Sequence[Run], path: Path) -> None:
    # A model may generate half of a pair of surrogates, which no file can hold.
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
    return environment.get_template("page.html").render(
        style=style, style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(), **summary(runs)
    )


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Return all figures and texts of the page."""
    fastest = max((task["tokens_per_s"] for run in runs for task in run.record["tasks"].values()), default=0.0)
    shown = [_run(run, fastest) for run in runs]
    panel = of_runs([run.record for run in runs])
    return {
        "title": f"Drafting on {shown[0]['model']}" if len(shown) == 1 else f"{len(shown)} runs",
        "headline": shown[0]["headline"] if len(shown) == 1 else "",
        "runs": shown,
        "curves": drawing(panel) if panel else None,
    }


def _run(run: Run, fastest: float) -> dict[str, Any]:
    record = run.record
    scales = _scales(record["tasks"].values())
    tasks = [_task(name, task, record["tasks"], fastest, scales) for name, task in record["tasks"].items()]
    settings, device = record["settings"], record["device"]
    answers = next(iter(record["tasks"].values()))["answers"]
    return {
        "name": run.name,
        "model": PurePath(settings["model"]).name,
        "headline": _headline(tasks),
        "device": device["device"],
        "mode": device["mode"],
        "made": record["made"].replace("+00:00", " UTC").replace("T", " ", 1),
        "measured": how_measured(record["measurement"]) if len(tasks) > 1 else "",
        "workload": f"{_number(len(answers), 'prompt')} of {_number(settings['osl'], 'token')}, "
        f"concurrency {settings['batch_size']}, temperature {settings['temperature']:g}",
        "tasks": tasks,
        "latency_scales": [(name.upper(), 1000 * scales[name]) for name in _LATENCIES],
        "prompts": [_prompt(number, record["tasks"]) for number in range(len(answers))],
        "command": _command(record),
        "facts": {**{name: str(value) for name, value in settings.items()}, **record["versions"]},
    }


def _headline(tasks: list[dict[str, Any]]) -> str:
    compared = [task for task in tasks if task["ratio"] is not None and task["k"]]
    if not compared:
        best = max(tasks, key=lambda task: float(task["tokens_per_s"]))
        return f"{best['name']}: {best['tokens_per_s']:.1f} tokens/s."
    best = max(compared, key=lambda task: float(task["ratio"]))
    plain = next(task["tokens_per_s"] for task in tasks if task["name"] == BASELINE)
    if best["ratio"] < _MIN_SPEEDUP:
        return (
            f"No speedup here: {best['name']} came nearest with {best['tokens_per_s']:.1f} tokens/s, against "
            f"{plain:.1f} without speculation."
        )
    return (
        f"{best['name']}: speedup {best['ratio']:.2f} over no speculation, {best['tokens_per_s']:.1f} tokens/s against "
        f"{plain:.1f}."
    )


def _scales(tasks: Collection[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds at the end of the latency bars: the largest of all tasks."""
    return {
        name: max((spread["high"] for task in tasks if (spread := _spread(task, name))), default=0.0)
        for name in _LATENCIES
    }


def _spread(task: dict[str, Any], name: str) -> dict[str, float] | None:
    """Return median and quartiles over all answers of all turns."""
    values = [one[name] for turn in task["latencies"] for one in turn if one[name] is not None]
    if not values:
        return None
    low, middle, high = quantiles(values * 2 if len(values) == 1 else values, n=4, method="inclusive")
    return {"low": low, "median": middle, "high": high}


def _latency(task: dict[str, Any], name: str, longest: float) -> dict[str, Any] | None:
    """Return a latency in milliseconds, and as a percentage of the longest for its bar."""
    if (spread := _spread(task, name)) is None:
        return None
    low, middle, high = (spread[of] for of in ("low", "median", "high"))
    bar = [_percent(value, longest) for value in (low, middle, high)]
    return {"name": name.upper(), "ms": [1000 * value for value in (middle, low, high)], "bar": bar}


def _step(step: dict[str, Any] | None) -> dict[str, Any] | None:
    if step is None:
        return None
    rows, whole = [], step["seconds"]
    for name in _PARTS:
        times = [(one["start"], one["end"]) for one in step["parts"] if one["part"] == name]
        if times:
            bars = [(_percent(start, whole), _percent(end - start, whole)) for start, end in times]
            rows.append((name, 1000 * sum(end - start for start, end in times), bars))
    return {"requests": step["requests"], "tokens": step["tokens"], "ms": 1000 * whole, "parts": rows}


def _task(
    name: str, task: dict[str, Any], tasks: dict[str, Any], fastest: float, scales: dict[str, float]
) -> dict[str, Any]:
    speedup, drafted_steps = task["speedup"], sum(task["accepted_lengths"])
    speed = task["tokens_per_s"]
    conclusions, graphs = task["matches_baseline"], task["graphs"]
    return {
        "name": name,
        "way": _DESCRIPTIONS.get(name, ""),
        "k": task["k"],
        "drafter": PurePath(task["draft_model"]).name if task["draft_model"] else "",
        "tokens_per_s": speed,
        "bar": _percent(speed, fastest),
        "ratio": 1.0 if name == BASELINE and len(tasks) > 1 else speedup["ratio"] if speedup else None,
        "spread": (speedup["low"], speedup["high"]) if speedup else None,
        "mean_acceptance_length": mean_acceptance_length(task),
        "tokens_per_step": task["tokens_per_step"],
        "acc_rate": task["acc_rate"],
        "drafts": (task["num_accepted_tokens"], task["num_draft_tokens"]),
        "same_text": _same_text(conclusions),
        # The share of the steps with drafts that accepted this one; a later position needs the earlier ones.
        "positions": [
            (position, _percent(count, task["num_drafts"])) for position, count in enumerate(task["acc_counts"], 1)
        ],
        "lengths": [
            (length, count, _percent(count, drafted_steps)) for length, count in enumerate(task["accepted_lengths"])
        ],
        "drafted_steps": drafted_steps,
        "graphs": graphs["warmup"],
        "late_graphs": graphs["after_warmup"],
        "late_compiles": task["compiled_after_warmup"],
        "steps": task["steps"],
        "syncs": task["host_syncs_per_step"],
        "latencies": [_latency(task, latency, scales[latency]) for latency in _LATENCIES],
        "step": _step(task["step"]),
    }


def _same_text(conclusions: dict[str, int] | None) -> str:
    if conclusions is None:
        return ""
    text = f"{conclusions.get('equal', 0)} of {sum(conclusions.values())}"
    return f"{text}, {conclusions['tied']} tied" if conclusions.get("tied") else text


def _prompt(number: int, tasks: dict[str, Any]) -> dict[str, Any]:
    answers = {name: task["answers"][number] for name, task in tasks.items() if number < len(task["answers"])}
    first = next(iter(answers.values()))
    return {
        "text": first["prompt"],
        "answers": [
            {
                "task": name,
                "parts": _parts(answer),
                "tokens": len(answer["pieces"]),
                "drafts": sum(step[1] for step in answer["steps"]),
                "steps": len(answer["steps"]),
            }
            for name, answer in answers.items()
        ],
    }


def _parts(answer: dict[str, Any]) -> list[tuple[str, int]]:
    """Split the text into parts with their number of accepted drafts; 0 for the target's own tokens."""
    parts: list[tuple[str, int]] = []
    start = 0
    for size, drafts in answer["steps"]:
        middle, end = start + drafts, start + size
        for text, number in (
            ("".join(answer["pieces"][start:middle]), drafts),
            ("".join(answer["pieces"][middle:end]), 0),
        ):
            if text and not number and parts and not parts[-1][1]:
                parts[-1] = (parts[-1][0] + text, 0)
            elif text:
                parts.append((text, number))
        start = end
    return parts


def _command(record: dict[str, Any]) -> str:
    settings = [f"{name}={shlex.quote(value)}" for name, value in record["environment"].items()]
    return " ".join([*settings, shlex.join(record["command"])])


def _percent(part: float, whole: float) -> float:
    return min(100.0, 100 * part / whole) if whole else 0.0


def _number(count: int, name: str) -> str:
    return f"{count} {name}" + ("s" if count != 1 else "")


# ---- curves ------------------------------------------------------------------------------------------------


WIDTH, HEIGHT = 380, 250
"""Small enough that text keeps its size on a phone."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 14, 14, 42
_MAX_TICKS = 6
_APART = 8
"""Distance between points of one x, so that their bars do not overlap."""
LINES = 6
"""Maximum number of lines; page.css has a color and a dash pattern for each."""


class Point(NamedTuple):
    x: int
    y: float
    low: float
    high: float


class Panel(NamedTuple):
    title: str
    x: str
    lines: dict[str, list[Point]]
    even: float
    """The level to compare with, which is drawn dashed."""


# ---- what is drawn -----------------------------------------------------------------------------------


def of_runs(records: list[dict[str, Any]]) -> Panel | None:
    """Return the speedup by task and k, if the runs are of one model at several concurrencies."""
    found: dict[str, dict[int, Point]] = defaultdict(dict)
    if len({record["settings"]["model"] for record in records}) > 1:
        return None
    for record in records:
        concurrency = record["settings"]["batch_size"]
        for name, task in record["tasks"].items():
            if task["k"] and (speedup := task["speedup"]) is not None:
                point = Point(concurrency, speedup["ratio"], speedup["low"], speedup["high"])
                found[f"{name}, k = {task['k']}"][concurrency] = point
    if len({point.x for points in found.values() for point in points.values()}) < 2:
        return None
    lines = {name: [points[x] for x in sorted(points)] for name, points in found.items()}
    return Panel("Speedup against concurrency", "concurrency", lines, even=1.0)


# ---- where it is drawn -------------------------------------------------------------------------------


def drawing(panel: Panel) -> dict[str, Any]:
    """Return the coordinates and texts that the template puts into its SVG."""
    lines = dict(list(panel.lines.items())[:LINES])
    points = [point for line in lines.values() for point in line]
    all_x = sorted({point.x for point in points})
    highest = max(panel.even, *(point.high for point in points))
    step = next(step for step in _steps() if highest / step <= _MAX_TICKS)
    num_ticks = math.ceil(highest / step)
    top = num_ticks * step
    width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def x_of(x: int, line: int | None = None) -> float:
        aside = 0.0 if line is None else (line - (len(lines) - 1) / 2) * _APART
        return _LEFT + width * (all_x.index(x) + 0.5) / len(all_x) + aside

    def y_of(y: float) -> float:
        return _TOP + height * (1 - y / top)

    return {
        "title": panel.title,
        "x": panel.x,
        "width": WIDTH,
        "height": HEIGHT,
        "left": _LEFT,
        "right": WIDTH - _RIGHT,
        "bottom": HEIGHT - _BOTTOM,
        "even": y_of(panel.even),
        "ticks": [(y_of(step * tick), f"{step * tick:g}") for tick in range(num_ticks + 1)],
        "marks": [(x_of(value), value) for value in all_x],
        "lines": [
            {
                "name": name,
                "path": " ".join(f"{x_of(point.x, i):.1f},{y_of(point.y):.1f}" for point in line),
                "points": [(x_of(p.x, i), y_of(p.y), y_of(p.low), y_of(p.high)) for p in line],
            }
            for i, (name, line) in enumerate(lines.items())
        ],
        "left_out": len(panel.lines) - len(lines),
        "words": "; ".join(
            f"{name}: {', '.join(f'{point.y:.2f} at {panel.x} {point.x}' for point in line)}"
            for name, line in lines.items()
        ),
    }


def _steps() -> Iterator[float]:
    """0.05, 0.1, 0.25, 0.5, 1, 2, 4, ..."""
    return itertools.chain((0.05, 0.1), (0.25 * 2**power for power in itertools.count()))

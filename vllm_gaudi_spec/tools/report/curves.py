"""Lines that the page draws as SVG: speedup against concurrency, of several runs, and what `gaudi-spec tune` measured.

The page's own, and no plotting library's. matplotlib would come with ten packages into every environment that has the
demo, and its SVG sets colours in `style` attributes, which the page's policy forbids: each picture would be two images,
for light and for dark, whose text nobody can read aloud or on a phone. Here the template draws, and page.css colours.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

WIDTH, HEIGHT = 380, 250
"""So that text is of its size on a phone too."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 14, 14, 42
_MAX_TICKS = 6
_APART = 8
"""Between points of one x, so that their bars do not cover each other."""
LINES = 6
"""More look alike; page.css has a colour and a dash pattern for each."""


class Point(NamedTuple):
    x: int
    y: float
    low: float
    high: float


class Panel(NamedTuple):
    title: str
    x: str
    lines: dict[str, list[Point]]
    even: float | None = None
    """A level to compare with."""
    best: tuple[str, int] | None = None
    """The line and x of the point with a ring."""


# ---- what is drawn -----------------------------------------------------------------------------------


def of_runs(records: list[dict[str, Any]]) -> Panel | None:
    """By task and k; of one model and at several concurrencies, else none."""
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


def of_choice(choice: dict[str, Any]) -> list[Panel]:
    """Acceptance by position and by k, and the speedup of each k at each batch size."""
    methods: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for candidate in choice["candidates"]:
        methods[candidate["method"]].append(candidate)
    ends = {name: max(several, key=lambda one: one["num_speculative_tokens"]) for name, several in methods.items()}
    panels = [
        Panel(
            "Per-position acceptance rate, of all steps",
            "position of the draft",
            {name: [_point(x, y) for x, y in enumerate(one["accepted_at"], 1)] for name, one in ends.items()},
        ),
        Panel(
            "Mean acceptance length, over all steps; bars: 95 %",
            "k",
            {name: [_length(one) for one in several] for name, several in methods.items()},
        ),
    ]
    for number, row in enumerate(choice["by_batch"]):
        best = (row["method"], row["num_speculative_tokens"]) if row["method"] else None
        lines = {
            name: [_point(one["num_speculative_tokens"], one["by_batch"][number]["speedup"]) for one in several]
            for name, several in methods.items()
        }
        panels.append(Panel(f"Speedup at batch size {row['batch']}", "k", lines, even=1.0, best=best))
    return panels


def _point(x: int, y: float) -> Point:
    return Point(x, y, y, y)


def _length(candidate: dict[str, Any]) -> Point:
    return Point(candidate["num_speculative_tokens"], candidate["tokens_per_step"], *candidate["tokens_per_step_95"])


# ---- where it is drawn -------------------------------------------------------------------------------


def drawing(panel: Panel) -> dict[str, Any]:
    """What the template puts into its SVG."""
    lines = dict(list(panel.lines.items())[:LINES])
    points = [point for line in lines.values() for point in line]
    all_x = sorted({point.x for point in points})
    highest = max(panel.even or 1e-9, *(point.high for point in points))
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
        "even": None if panel.even is None else y_of(panel.even),
        "ticks": [(y_of(step * tick), f"{step * tick:g}") for tick in range(num_ticks + 1)],
        "marks": [(x_of(value), value) for value in all_x],
        "lines": [
            {
                "name": name,
                "path": " ".join(f"{x_of(point.x, i):.1f},{y_of(point.y):.1f}" for point in line),
                "points": [
                    (x_of(p.x, i), y_of(p.y), y_of(p.low), y_of(p.high), panel.best == (name, p.x)) for p in line
                ],
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

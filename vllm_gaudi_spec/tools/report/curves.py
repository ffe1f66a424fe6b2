"""Lines that the page draws as SVG: speedup against concurrency, of several runs.

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
    even: float
    """The level to compare with, which is drawn dashed."""


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


# ---- where it is drawn -------------------------------------------------------------------------------


def drawing(panel: Panel) -> dict[str, Any]:
    """What the template puts into its SVG."""
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

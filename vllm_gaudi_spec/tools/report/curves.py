"""Speedup against concurrency, of runs that differ in it: a line for each way of drafting and k, drawn as SVG."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

WIDTH, HEIGHT = 700, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 190, 14, 42
_MAX_TICKS = 6
_LABEL_HEIGHT = 16
_APART = 8
"""Between points of one concurrency, so that their bars do not cover each other."""
LINES = 6
"""More look alike; page.css has a colour and a dash pattern for each."""


class Point(NamedTuple):
    concurrency: int
    speedup: float
    low: float
    high: float


def lines_of(records: list[dict[str, Any]]) -> dict[str, list[Point]]:
    """By task and k; of one model and at several concurrencies, else none."""
    found: dict[str, dict[int, Point]] = defaultdict(dict)
    if len({record["settings"]["model"] for record in records}) > 1:
        return {}
    for record in records:
        concurrency = record["settings"]["batch_size"]
        for name, task in record["tasks"].items():
            if task["k"] and (speedup := task["speedup"]) is not None:
                point = Point(concurrency, speedup["ratio"], speedup["low"], speedup["high"])
                found[f"{name}, k = {task['k']}"][concurrency] = point
    several = len({point.concurrency for points in found.values() for point in points.values()}) > 1
    return {name: [points[x] for x in sorted(points)] for name, points in found.items()} if several else {}


def drawing(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What the template puts into its SVG; None where there is nothing to draw."""
    found = lines_of(records)
    if not found:
        return None
    lines = dict(list(found.items())[:LINES])
    points = [point for line in lines.values() for point in line]
    all_x = sorted({point.concurrency for point in points})
    highest = max(1.0, *(point.high for point in points))
    step = next(step for step in _steps() if highest / step <= _MAX_TICKS)
    num_ticks = math.ceil(highest / step)
    top = num_ticks * step
    width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def x_of(concurrency: int, line: int | None = None) -> float:
        aside = 0.0 if line is None else (line - (len(lines) - 1) / 2) * _APART
        return _LEFT + width * (all_x.index(concurrency) + 0.5) / len(all_x) + aside

    def y_of(speedup: float) -> float:
        return _TOP + height * (1 - speedup / top)

    ends = _apart([y_of(line[-1].speedup) for line in lines.values()])
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "left": _LEFT,
        "right": WIDTH - _RIGHT,
        "bottom": HEIGHT - _BOTTOM,
        "even": y_of(1.0),
        "ticks": [(y_of(step * tick), f"{step * tick:g}") for tick in range(num_ticks + 1)],
        "concurrencies": [(x_of(value), value) for value in all_x],
        "lines": [
            {
                "name": name,
                "path": " ".join(f"{x_of(point.concurrency, i):.1f},{y_of(point.speedup):.1f}" for point in line),
                "points": [(x_of(p.concurrency, i), y_of(p.speedup), y_of(p.low), y_of(p.high)) for p in line],
                "end": (x_of(line[-1].concurrency, i), y_of(line[-1].speedup)),
                "label": ends[i],
            }
            for i, (name, line) in enumerate(lines.items())
        ],
        "left_out": len(found) - len(lines),
        "words": "; ".join(f"{name}: {', '.join(_in_words(point) for point in line)}" for name, line in lines.items()),
    }


def _steps() -> Iterator[float]:
    """0.25, 0.5, 1, 2, 4, ..."""
    return (0.25 * 2**power for power in itertools.count())


def _in_words(point: Point) -> str:
    return f"{point.speedup:.2f} at concurrency {point.concurrency}"


def _apart(heights: list[float]) -> list[float]:
    """Heights of labels beside the ends of lines, moved down as far as they would cover each other."""
    found, lowest = list(heights), 0.0
    for index in sorted(range(len(heights)), key=heights.__getitem__):
        found[index] = max(heights[index], lowest)
        lowest = found[index] + _LABEL_HEIGHT
    return found

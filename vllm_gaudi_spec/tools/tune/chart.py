"""A choice as an SVG that needs nothing else: per-position acceptance, and the speedup of each k by batch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from vllm_gaudi_spec.tools.tune.choice import Candidate, Choice

_PLOT = (280, 200)
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 24, 40, 44
_PANEL = (_PLOT[0] + _LEFT + _RIGHT, _PLOT[1] + _TOP + _BOTTOM)
_COLUMNS = 3
_HEADER, _LEGEND = 64, 28
_TICKS = 5
# Apart in lightness as well as in hue.
_COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#8e5ea2", "#e08e0b", "#4d4d4d")
_STYLE = (
    "text{font-family:sans-serif;font-size:12px;fill:#222}.title{font-size:13px;font-weight:bold}"
    ".head{font-size:17px;font-weight:bold}.axis{stroke:#888}.grid{stroke:#e3e3e3}"
    ".even{stroke:#222;stroke-dasharray:4 3}"
)


@dataclass(frozen=True)
class Line:
    name: str
    points: tuple[tuple[float, float], ...]
    marked: float | None = None
    """The x of the highlighted point."""


@dataclass(frozen=True)
class Panel:
    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    even: float | None = None
    """A level to compare with."""


def draw(choice: Choice, heading: str, note: str) -> str:
    """The SVG's text."""
    return picture(list(_panels(choice)), heading, note)


def _panels(choice: Choice) -> Iterator[Panel]:
    methods = [(name, list(group)) for name, group in groupby(choice.candidates, lambda candidate: candidate.name)]
    longest = [group[-1] for _, group in methods]
    yield Panel(
        "Per-position acceptance rate",
        "position of the draft",
        "share of all steps",
        tuple(Line(candidate.name, _numbered(candidate.acceptance.positions)) for candidate in longest),
    )
    yield Panel(
        "Mean acceptance length, over all steps",
        "k",
        "tokens",
        tuple(
            Line(name, tuple((one.num_drafts, one.acceptance.tokens_per_step) for one in group))
            for name, group in methods
        ),
    )
    for batch in choice.batches:
        best = choice.best_at(batch)
        title = f"best {best.name}, k = {best.num_drafts}" if best else "drafting does not pay"
        lines = tuple(Line(name, _speedups(group, batch), _marked(best, group)) for name, group in methods)
        yield Panel(f"Batch {batch}: {title}", "k", "speedup over no speculation", lines, even=1.0)


def _numbered(values: Sequence[float]) -> tuple[tuple[float, float], ...]:
    return tuple(enumerate(values, 1))


def _speedups(group: list[Candidate], batch: int) -> tuple[tuple[float, float], ...]:
    return ((0, 1.0), *((candidate.num_drafts, candidate.speedup(batch)) for candidate in group))


def _marked(best: Candidate | None, group: list[Candidate]) -> float | None:
    return best.num_drafts if best in group and best is not None else None


# ---- drawing --------------------------------------------------------------------------------------------


def picture(panels: list[Panel], heading: str, note: str) -> str:
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    columns = min(_COLUMNS, len(panels))
    width = columns * _PANEL[0]
    height = _HEADER + _LEGEND + -(-len(panels) // columns) * _PANEL[1]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f'<style>{_STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>',
        _text(_LEFT, 28, heading, "head"),
        _text(_LEFT, 50, note),
    ]
    for i, name in enumerate(names):
        x = _LEFT + 150 * i
        parts.append(f'<rect x="{x}" y="{_HEADER + 2}" width="14" height="4" fill="{colours[name]}"/>')
        parts.append(_text(x + 20, _HEADER + 8, name))
    for i, panel in enumerate(panels):
        left = i % columns * _PANEL[0] + _LEFT
        top = _HEADER + _LEGEND + i // columns * _PANEL[1] + _TOP
        parts.append(f'<g transform="translate({left},{top})">{"".join(_drawn(panel, colours))}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _drawn(panel: Panel, colours: dict[str, str]) -> Iterator[str]:
    width, height = _PLOT
    points = [point for line in panel.lines for point in line.points]
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    top = 1.1 * max(panel.even or 0.0, *(y for _, y in points), 1e-9)

    def at(x: float, y: float) -> tuple[float, float]:
        return (x - x_low) / max(x_high - x_low, 1) * width, height - y / top * height

    yield _text(0, -12, panel.title, "title")
    for tick in range(_TICKS + 1):
        value = top * tick / _TICKS
        y = at(x_low, value)[1]
        yield f'<line class="grid" x1="0" x2="{width}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(-6, y + 4, f"{value:.2f}", anchor="end")
    for value in sorted({x for x, _ in points}):
        yield _text(at(value, 0)[0], height + 16, f"{value:g}", anchor="middle")
    yield _text(width / 2, height + 34, f"{panel.x}; up: {panel.y}", anchor="middle")
    yield f'<path class="axis" fill="none" d="M0,0 V{height} H{width}"/>'
    if panel.even is not None:
        y = at(x_low, panel.even)[1]
        yield f'<line class="even" x1="0" x2="{width}" y1="{y:.1f}" y2="{y:.1f}"/>'
    for line in panel.lines:
        placed = [at(*point) for point in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        yield f'<polyline fill="none" stroke="{colours[line.name]}" stroke-width="2" points="{path}"/>'
        for (value, _), (x, y) in zip(line.points, placed, strict=True):
            ring = ' stroke="#222" stroke-width="2"' if value == line.marked else ""
            size = 7 if value == line.marked else 3
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{colours[line.name]}"{ring}/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(text)}</text>'

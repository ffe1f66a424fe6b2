"""How costs grow with batch, drafts, context and vocabulary: the reports of the other benchmarks, read along each axis.

python benchmarks/scaling.py .bench/verify.json .bench/end_to_end.json .bench/host_overhead.json .bench/rejection.json

A line is a figure with everything but one axis fixed. `exponent` is the slope between its ends on logarithmic scales: 0
is a cost that does not grow, 1 one that grows in proportion.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import common

from vllm_gaudi_spec.tools.io.command_line import Parser

# Figures and the axes along which they may grow, under the names that the reports give them.
FIGURES = {
    "plain_ms": ("batch", "context"),
    "verify_ms": ("batch", "k", "context"),
    "flattened_ms": ("batch", "k", "context"),
    "draft_ms": ("batch",),
    "plain_tok_s": ("batch",),
    "drafted_tok_s": ("batch",),
    "us_per_step": ("batch",),
    "seconds.ours": ("batch", "drafts", "vocab"),
}
KINDS = ("rule", "rate")
"""What else rows differ in."""


class Line(NamedTuple):
    report: str
    figure: str
    axis: str
    fixed: dict[str, Any]
    points: list[tuple[float, float]]

    @property
    def exponent(self) -> float:
        (first_x, first_y), (last_x, last_y) = self.points[0], self.points[-1]
        return math.log(last_y / first_y) / math.log(last_x / first_x)


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "reports", type=Path, nargs="+", metavar="FILE", help="a report that another benchmark wrote with --json"
    )
    common.add_json(parser)
    return parser.parse_args()


def lines_of(report: str, rows: list[dict[str, Any]]) -> Iterator[Line]:
    """Every figure along every axis that has more than one point."""
    rows = [flat(row) for row in rows]
    for figure, axes in FIGURES.items():
        for axis in axes:
            # A plain step knows no rates.
            others = [name for name in (*(() if figure.startswith("plain") else KINDS), *axes) if name != axis]
            groups: dict[tuple[Any, ...], dict[float, float]] = {}
            for row in rows:
                if axis in row and row.get(figure, 0) > 0:
                    groups.setdefault(tuple(row.get(name) for name in others), {})[row[axis]] = row[figure]
            for key, points in groups.items():
                if len(points) > 1:
                    fixed = {name: value for name, value in zip(others, key, strict=True) if value is not None}
                    yield Line(report, figure, axis, fixed, sorted(points.items()))


def flat(row: dict[str, Any]) -> dict[str, Any]:
    inner = {f"{name}.{key}": x for name, part in row.items() if isinstance(part, dict) for key, x in part.items()}
    return row | inner


def show(lines: list[Line]) -> None:
    tables: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        tables.setdefault((line.report, line.figure, line.axis, *line.fixed), []).append(line)
    for (report, figure, axis, *_), members in tables.items():
        xs = sorted({x for line in members for x, _ in line.points})
        header = [*members[0].fixed, *(f"{axis} {x:g}" for x in xs), "exponent"]
        body = []
        for line in members:
            found = dict(line.points)
            cells = [f"{found[x]:.4g}" if x in found else "" for x in xs]
            body.append([*map(str, line.fixed.values()), *cells, f"{line.exponent:.2f}"])
        common.log(f"\n{report}: {figure} along {axis}\n\n{common.table(header, body)}")


def main() -> int:
    options = parse_options()
    lines = []
    for path in options.reports:
        report = json.loads(path.read_text())
        lines += lines_of(path.stem, report.get("rows") or report["cells"])
    if not lines:
        common.log("error: these reports have no figure at more than one point of an axis")
        return 1
    show(lines)
    common.write_json(options.json, [{**line._asdict(), "exponent": line.exponent} for line in lines])
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""As much of PromQL as docs/grafana.json and docs/metrics.md use: what their expressions ask of a server's metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from prometheus_client import Metric

DASHBOARD = Path(__file__).parents[1] / "docs/grafana.json"
PAGE = Path(__file__).parents[1] / "docs/metrics.md"

OVER_TIME = {"rate", "increase"}
KNOWN = OVER_TIME | {"sum", "max", "by", "on", "group_left", "histogram_quantile"}
SELECTOR = re.compile(r"(?:(\w+)\s*\(\s*)?([a-z]+:\w+)\{([^}]*)\}(\[[^\]]+\])?")
MATCHER = re.compile(r'^(\w+)(=~|!~|!=|=)"([^"]*)"$')
WINDOW = re.compile(r"^\[(\d+[smhd]|\$__rate_interval)\]$")
# Labels that Prometheus adds to what it reads.
ADDED = {"instance", "job"}
# Letters with anything but a dot or a digit before them; numbers are no names.
NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")


class Use(NamedTuple):
    """One series in an expression."""

    name: str
    labels: set[str]
    """Those it is to have."""
    function: str
    """What stands right before it; empty if nothing does."""


class Panel(NamedTuple):
    title: str
    kind: str
    expressions: list[str]


def panels() -> list[Panel]:
    """Of the dashboard, those that show something."""
    found = [one for one in json.loads(DASHBOARD.read_text())["panels"] if one["type"] != "row"]
    return [Panel(one["title"], one["type"], [target["expr"] for target in one["targets"]]) for one in found]


def queries_of_page() -> list[str]:
    return re.findall(r"```promql\n(.*?)```", PAGE.read_text(), re.DOTALL)


def queries_of_variables() -> list[Use]:
    """What the dashboard's variables are filled from."""
    uses = []
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\(([a-z]+:\w+)(?:\{(.*)\})?, (\w+)\)", variable["query"]["query"])
            assert asked, variable["query"]
            name, matchers, label = asked.groups()
            uses.append(Use(name, {label, *_matched(matchers or "")}, ""))
    return uses


def _matched(matchers: str) -> Iterator[str]:
    for matcher in filter(None, (part.strip() for part in matchers.split(","))):
        found = MATCHER.match(matcher)
        assert found, f"no matcher: {matcher}"
        yield found[1]


def uses(expression: str) -> list[Use]:
    """The series of an expression. Fails on what is no PromQL, as far as it is used here."""
    assert expression.count("(") == expression.count(")"), expression
    found = []
    for match in SELECTOR.finditer(expression):
        function, name, matchers, window = match.groups()
        assert bool(window) == (function in OVER_TIME), f"a window belongs in rate or increase: {match[0]}"
        assert window is None or WINDOW.match(window), window
        labels = {*_matched(matchers), *_grouped(expression, match.start(2))}
        found.append(Use(name, labels, function or ""))
    assert found, f"no series in {expression}"
    rest = re.sub(r"\b(by|on|group_left) \(\w*\)", "", SELECTOR.sub(r"\1(", expression))
    strange = set(NAME.findall(rest)) - KNOWN
    assert not strange, f"unknown: {strange} in {expression}; a series is written with its braces"
    return found


def _grouped(expression: str, place: int) -> Iterator[str]:
    """Labels of the aggregations around a place."""
    for match in re.finditer(r"\b(?:sum|max) by \((\w+)\) \(", expression):
        depth = 1
        for end in range(match.end(), len(expression)):
            depth += {"(": 1, ")": -1}.get(expression[end], 0)
            if not depth:
                break
        if match.end() <= place < end:
            yield match[1]


def check(expression: str, families: Iterable[Metric], *, is_number: bool = False) -> set[str]:
    """Its series are there, with their labels, and of the kinds that its functions want; returns their names.
    `is_number`: it makes no curve but one number, so a counter may be shown as it stands."""
    families = list(families)
    for use in (found := uses(expression)):
        _check_use(use, families, is_number)
    return {use.name for use in found}


def _check_use(use: Use, families: list[Metric], is_number: bool) -> None:
    found = [(family, sample) for family in families for sample in family.samples if sample.name == use.name]
    assert found, f"no series {use.name}"
    labels = ADDED | {label for _, sample in found for label in sample.labels}
    assert use.labels <= labels, f"{use.name} has no label {use.labels - labels}"
    kind = found[0][0].type
    if kind == "gauge":
        assert use.function not in OVER_TIME, f"{use.name} is a gauge: it has no rate"
    else:
        assert use.name.endswith("_total" if kind == "counter" else "_bucket"), use.name
        assert use.function in OVER_TIME or is_number, f"{use.name} only grows: its rate says something"


def check_all(families: list[Metric]) -> set[str]:
    """Every expression of the dashboard and of the page; returns the series that the dashboard shows."""
    for query in queries_of_page():
        check(query, families)
    for use in queries_of_variables():
        _check_use(use, families, is_number=True)
    return {
        name
        for panel in panels()
        for expression in panel.expressions
        for name in check(expression, families, is_number=panel.kind == "stat")
    }

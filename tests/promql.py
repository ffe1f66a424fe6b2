"""What the expressions of docs/grafana.json, docs/alerts.yaml and docs/metrics.md ask of a server's metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser as promql
import yaml
from prometheus_client import Metric

DASHBOARD = Path(__file__).parents[1] / "docs/grafana.json"
ALERTS = Path(__file__).parents[1] / "docs/alerts.yaml"
PAGE = Path(__file__).parents[1] / "docs/metrics.md"

RATES = {"rate", "irate", "increase"}
KEEP_LABELS = {"topk", "bottomk"}
"""Aggregations whose result has all labels of what they choose from."""
SAMPLES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
"""Ends of the names of what only grows, by kind."""
STATE = "DrafterSwitchedOff"
"""The alert about a counter that stays at 1, so it is not asked for its increase."""
# Labels that Prometheus adds to what it reads.
ADDED = {"instance", "job"}
VARIABLE = re.compile(r"\$(\w+|{\w+})")


class Use(NamedTuple):
    """One series in an expression."""

    name: str
    labels: set[str]
    """Those it is to have."""
    function: str
    """What is called with it alone; empty if nothing is."""


class Panel(NamedTuple):
    title: str
    kind: str
    expressions: list[str]


def panels() -> list[Panel]:
    """Of the dashboard, those that show something."""
    found = [one for one in json.loads(DASHBOARD.read_text())["panels"] if one["type"] != "row"]
    return [Panel(one["title"], one["type"], [target["expr"] for target in one["targets"]]) for one in found]


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def queries_of_page() -> list[str]:
    return re.findall(r"```promql\n(.*?)```", PAGE.read_text(), re.DOTALL)


def queries_of_variables() -> list[Use]:
    """What the dashboard's variables are filled from."""
    found = []
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
            assert asked, variable["query"]
            (use,) = uses(asked[1])
            assert not use.function, "of a series, not of what is computed from it"
            found.append(use._replace(labels={asked[2], *use.labels}))
    return found


def uses(expression: str) -> list[Use]:
    """The series of an expression. A ValueError says that it is no PromQL."""
    tree = promql.parse(
        VARIABLE.sub(lambda name: "5m" if name[1].strip("{}") == "__rate_interval" else "any", expression)
    )
    found = list(_uses(tree, set(), ""))
    assert found, f"no series in {expression}"
    return found


def _uses(node: Any, wanted: set[str], function: str) -> Iterator[Use]:
    """`wanted`: labels that what is around the node wants of its value; `function`: what is called with it."""
    match node:
        case promql.VectorSelector():
            assert not node.matchers.or_matchers, "an `or` between matchers is not for every Prometheus"
            assert node.name, f"a series without a name: {node}"
            yield Use(node.name, wanted | {matcher.name for matcher in node.matchers.matchers}, function)
        case promql.MatrixSelector():
            assert function, f"a window belongs in a function: {node}"
            yield from _uses(node.vector_selector, wanted, function)
        case promql.ParenExpr() | promql.UnaryExpr():
            yield from _uses(node.expr, wanted, function)
        case promql.Call():
            own = {"le"} if node.func.name == "histogram_quantile" else set()
            for argument in node.args:
                yield from _uses(argument, wanted | own, node.func.name)
        case promql.AggregateExpr():
            yield from _uses(node.expr, _wanted_below(node, wanted), "")
        case promql.BinaryExpr():
            for side, labels in zip((node.lhs, node.rhs), _wanted_of_sides(node, wanted), strict=True):
                yield from _uses(side, labels, "")
        case promql.NumberLiteral() | promql.StringLiteral():
            pass
        case _:
            raise AssertionError(f"not known here: {type(node).__name__} {node}")


def _wanted_below(node: promql.AggregateExpr, wanted: set[str]) -> set[str]:
    if str(node.op) in KEEP_LABELS:
        return wanted
    grouping = node.modifier
    labels = set(grouping.labels) if grouping else set()
    is_without = grouping is not None and grouping.type == promql.AggModifierType.Without
    lost = wanted & labels if is_without else wanted - labels
    assert not lost, f"{node} has no label {lost}"
    return wanted | labels


def _wanted_of_sides(node: promql.BinaryExpr, wanted: set[str]) -> tuple[set[str], set[str]]:
    matching = node.modifier and node.modifier.matching
    if matching is None or matching.type == promql.LabelModifierType.Exclude:
        return wanted, wanted - set(matching.labels if matching else ())
    on, more = set(matching.labels), set(node.modifier.group_labels or ())
    kind = promql.VectorMatchCardinality
    match node.modifier.card:
        case kind.ManyToOne:
            return on | wanted - more, on | more
        case kind.OneToMany:
            return on | more, on | wanted - more
        case kind.ManyToMany:  # `and`, `or`, `unless`
            return on | wanted, on
    assert wanted <= on, f"{node} has no label {wanted - on}"
    return on, on


def labels_of_result(expression: str) -> set[str]:
    """Of an expression whose series are all aggregated."""
    return _labels_of(promql.parse(expression))


def _labels_of(node: Any) -> set[str]:
    match node:
        case promql.ParenExpr() | promql.UnaryExpr():
            return _labels_of(node.expr)
        case promql.AggregateExpr():
            assert node.modifier is None or node.modifier.type == promql.AggModifierType.By, f"not known here: {node}"
            return set(node.modifier.labels) if node.modifier else set()
        case promql.BinaryExpr():
            # The many side's, which is the left one in all that we write.
            sides = [side for side in (node.lhs, node.rhs) if not isinstance(side, promql.NumberLiteral)]
            return _labels_of(sides[0])
    raise AssertionError(f"not known here: {type(node).__name__} {node}")


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
        assert use.function not in RATES, f"{use.name} is a gauge: it has no rate"
    else:
        assert use.name.endswith(SAMPLES[kind]), use.name
        assert use.function in RATES or is_number, f"{use.name} only grows: its rate says something"


def check_all(families: list[Metric]) -> set[str]:
    """Every expression of the dashboard, the alerts and the page; returns the series that the dashboard shows."""
    for query in queries_of_page():
        check(query, families)
    for rule in alerts():
        check(rule["expr"], families, is_number=rule["alert"] == STATE)
    for use in queries_of_variables():
        _check_use(use, families, is_number=True)
    return {
        name
        for panel in panels()
        for expression in panel.expressions
        for name in check(expression, families, is_number=panel.kind == "stat")
    }

"""PromQL expressions of docs/grafana.json, docs/alerts.yaml and docs/how_to/monitor.md."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import promql_parser
import yaml
from prometheus_client import Metric

DOCS = Path(__file__).parents[1] / "docs"
_SERIES = re.compile(r"\b(?:vllm|gaudi_spec):\w+")
_LABELS = re.compile(r'(?:(\w+)(?:=~?|!=)"|\bby \(([^)]*)\))')
_ADDED_BY_PROMETHEUS = {"instance", "job"}


def dashboard_expressions() -> list[str]:
    panels = json.loads((DOCS / "grafana.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DOCS / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def series_in(expression: str) -> set[str]:
    """Return the names of an expression's series. Raises ValueError if it is not PromQL."""
    promql_parser.parse(expression.replace("$__rate_interval", "5m"))
    return set(_SERIES.findall(expression))


def check_all(families: Iterable[Metric]) -> set[str]:
    """Check that the series and labels of every expression are exported. Return the series on the dashboard."""
    labels: dict[str, set[str]] = {}
    for sample in (sample for family in families for sample in family.samples):
        labels.setdefault(sample.name, set()).update(sample.labels)
    page = re.findall(r"```promql\n(.*?)```", (DOCS / "how_to" / "monitor.md").read_text(), re.DOTALL)
    for expression in (*dashboard_expressions(), *page, *(rule["expr"] for rule in alerts())):
        names = series_in(expression)
        assert names, expression
        assert names <= set(labels), f"{names - set(labels)} in {expression}"
        known = _ADDED_BY_PROMETHEUS.union(*(labels[name] for name in names))
        for matched, grouped in _LABELS.findall(expression):
            used = {matched} if matched else set(re.findall(r"\w+", grouped))
            assert used <= known, f"{used - known} in {expression}"
    return set().union(*map(series_in, dashboard_expressions()))

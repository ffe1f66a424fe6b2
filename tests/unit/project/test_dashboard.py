"""The dashboard asks for metrics that exist. tests/full_tests/test_metrics.py asks a running server for them."""

from __future__ import annotations

import re

import pytest
from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from tests.promql import check, panels, queries_of_page, uses
from vllm_gaudi_spec.scheduling.metrics import SERIES

EXPRESSIONS = [*(text for panel in panels() for text in panel.expressions), *queries_of_page()]


def test_every_metric_of_ours_that_is_asked_for_is_exported() -> None:
    exported = {name if series.is_gauge else f"{name}_total" for name, series in SERIES.items()}
    named = {use.name for expression in EXPRESSIONS for use in uses(expression)}
    assert {name for name in named if "gaudi_spec" in name} == exported


# --- the check itself ---


def families() -> list[Metric]:
    counter = CounterMetricFamily("vllm:made", "", labels=["engine"])
    counter.add_metric(["0"], 1)
    gauge = GaugeMetricFamily("vllm:usage", "", labels=["engine"])
    gauge.add_metric(["0"], 1)
    return [counter, gauge]


@pytest.mark.parametrize(
    "expression",
    [
        'sum by (engine) (rate(vllm:made_total{engine=~"$engine"}[$__rate_interval]))',
        "max by (engine) (vllm:usage{}) / on () group_left () sum(rate(vllm:made_total{}[5m]))",
        "max_over_time(vllm:usage[$__rate_interval])",
    ],
)
def test_correct_expression_passes(expression: str) -> None:
    assert check(expression, families()) <= {"vllm:made_total", "vllm:usage"}


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("rate(vllm:made{}[5m])", "no series vllm:made"),
        ("sum(vllm:made_total{})", "only grows"),
        ("rate(vllm:usage{}[5m])", "is a gauge"),
        ('rate(vllm:made_total{reason="x"}[5m])', "no label {'reason'}"),
        ("sum by (engine) (sum(vllm:usage))", "no label {'engine'}"),
        ("vllm:usage / on (x) vllm:usage", "no label {'x'}"),
    ],
)
def test_wrong_expression_fails(expression: str, wrong: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(wrong)):
        check(expression, families())


def test_what_is_not_promql_fails() -> None:
    with pytest.raises(ValueError):
        check("sum(vllm:usage{}", families())

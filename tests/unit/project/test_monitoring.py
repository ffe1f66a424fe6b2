"""Dashboard and alerts name series that are exported; tests/full_tests/test_metrics.py asks a running server."""

import re
from typing import Any

import pytest

from tests.promql import alerts, all_expressions, dashboard_expressions, series_in
from vllm_gaudi_spec.metrics import SERIES

EXPORTED = {name if series.is_gauge else f"{name}_total" for name, series in SERIES.items()}


def own_series(expressions: list[str]) -> set[str]:
    return {name for expression in expressions for name in series_in(expression) if name.startswith("gaudi_spec:")}


def test_dashboard_shows_every_series_and_nothing_else_is_asked_for() -> None:
    assert own_series(dashboard_expressions()) == EXPORTED
    assert own_series(all_expressions()) <= EXPORTED


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_alert_texts_name_labels_of_the_expression(rule: dict[str, Any]) -> None:
    named = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert "instance" in named
    assert named <= set(re.findall(r"\w+", re.findall(r"by \(([^)]*)\)", rule["expr"])[0]))

"""The alert rules: a file that Prometheus takes, about series that there are. tests/full_tests/test_metrics.py asks a
running server for them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.promql import ALERTS, PAGE, alerts, labels_of_result, uses
from tests.promql_values import Labels, value_of
from vllm_gaudi_spec.scheduling.metrics import SERIES

# Of a rule that alerts; another key makes Prometheus refuse the whole file.
KEYS = {"alert", "expr", "for", "keep_firing_for", "labels", "annotations"}
DURATION = re.compile(r"(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?")
FUNCTIONS = {"humanize", "humanizePercentage", "humanizeDuration"}
RULES = [pytest.param(rule, id=rule["alert"]) for rule in alerts()]


def test_the_file_is_one_of_rules() -> None:
    content = yaml.safe_load(ALERTS.read_text())
    assert set(content) == {"groups"}
    for group in content["groups"]:
        assert set(group) == {"name", "rules"}
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names)) >= 7


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_one(rule: dict[str, Any]) -> None:
    assert set(rule) <= KEYS
    assert re.fullmatch(r"[A-Za-z]+", rule["alert"])
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    if "for" in rule:
        assert rule["for"]
        assert DURATION.fullmatch(rule["for"])


@pytest.mark.parametrize("rule", RULES)
def test_its_series_are_exported(rule: dict[str, Any]) -> None:
    exported = {name if series.is_gauge else f"{name}_total": series for name, series in SERIES.items()}
    for use in uses(rule["expr"]):
        if "gaudi_spec" in use.name:
            series = exported[use.name]
            assert use.labels <= {"instance", "engine", "model_name", series.label}
    for label, value in re.findall(r'(\w+)="(\w+)"', rule["expr"]):
        assert any(series.label == label and value in series.values for series in SERIES.values())


@pytest.mark.parametrize("rule", RULES)
def test_its_texts_name_labels_that_the_result_has(rule: dict[str, Any]) -> None:
    texts = " ".join(rule["annotations"].values())
    named = set(re.findall(r"\$labels\.(\w+)", texts))
    assert "instance" in named
    assert named <= labels_of_result(rule["expr"])
    for template in re.findall(r"{{(.*?)}}", texts):
        assert re.fullmatch(rf" \$(labels\.\w+|value)( \| ({'|'.join(FUNCTIONS)}))? ", template)
    assert texts.count("{{") == texts.count("}}")


def test_the_page_has_a_row_for_each() -> None:
    rows = re.findall(r"^\| `([A-Za-z]+)` \| (\w+) \|", PAGE.read_text().partition("## Alerts")[2], re.M)
    assert rows == [(rule["alert"], rule["labels"]["severity"]) for rule in alerts()]


@pytest.mark.parametrize(
    ("expression", "labels"),
    [
        ("sum by (instance) (rate(a_total[5m])) > 0", {"instance"}),
        ("max by (a, b) (x) / on (a) group_left () sum by (a) (y) < 0.5", {"a", "b"}),
        ("sum by (a) (x) / sum by (a) (y) < 0.5 * (sum by (a) (z)) and sum by (a) (w) > 1", {"a"}),
        ("sum(x)", set()),
    ],
)
def test_labels_of_a_result(expression: str, labels: set[str]) -> None:
    assert labels_of_result(expression) == labels


# ---- collapsed acceptance, over series of samples ---------------------------------------------------------

HOUR, DAY = 3600.0, 86400.0
OLD, NEW = (frozenset({("instance", pod), ("model_name", "m")}) for pod in ("10.0.0.1:8000", "10.0.0.2:8000"))


def counters(server: Labels, start: float, end: float, drafts: float, rate: float) -> dict[Any, Any]:
    """A server's, read every five minutes: `drafts` a second, of which the share `rate` is accepted."""
    times = [start + second for second in range(0, int(end - start) + 1, 300)]
    return {
        (f"vllm:spec_decode_num_{what}_tokens_total", server): [(t, (t - start) * grow) for t in times]
        for what, grow in (("draft", drafts), ("accepted", drafts * rate))
    }


@pytest.mark.parametrize(
    ("drafts", "rate", "hours", "fires"),
    [
        (30.0, 0.1, 1.0, True),
        (30.0, 0.1, 72.0, True),
        (0.5, 0.1, 1.0, True),  # as adaptive drafting does where it does not pay: a step in 32
        (0.05, 0.1, 1.0, False),
        (30.0, 0.5, 1.0, False),
    ],
)
def test_a_restart_with_another_drafter(drafts: float, rate: float, hours: float, fires: bool) -> None:
    """The second server has another address, as pods do; for eight days the first one accepted 60 %."""
    (rule,) = (rule for rule in alerts() if rule["alert"] == "AcceptanceCollapsed")
    restart, now = 8 * DAY, 8 * DAY + hours * HOUR
    samples = counters(OLD, 0.0, restart, 30.0, 0.6) | counters(NEW, restart, now, drafts, rate)
    assert value_of(rule["expr"], samples, restart) == {}
    found = value_of(rule["expr"], samples, now)
    assert found == ({NEW: pytest.approx(rate)} if fires else {})

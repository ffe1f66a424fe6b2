"""The alert rules: a file that Prometheus takes, about series that there are. tests/full_tests/test_metrics.py asks a
running server for them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.promql import alerts, labels_of_result, uses
from tests.promql_values import Labels, value_of
from vllm_gaudi_spec.scheduling.metrics import SERIES

FUNCTIONS = {"humanize", "humanizePercentage", "humanizeDuration"}
RULES = [pytest.param(rule, id=rule["alert"]) for rule in alerts()]


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

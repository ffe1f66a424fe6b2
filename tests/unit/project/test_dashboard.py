"""The dashboard and the page about metrics: in themselves, and beside what is exported. A running server's metrics are
looked at in tests/full_tests/test_metrics.py."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from tests.promql import DASHBOARD, PAGE, check, panels, queries_of_page, uses
from tests.support.processes import clients_python
from vllm_gaudi_spec.scheduling.metrics import (
    AUDIT_REASONS,
    AUDIT_RESULTS,
    AUDITS,
    AUDITS_SKIPPED,
    REASONS,
    SERIES,
)


def rows_of_page() -> list[list[str]]:
    """Cells of its tables."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_series_of_ours_is_shown_and_explained() -> None:
    shown = {use.name for panel in panels() for expression in panel.expressions for use in uses(expression)}
    table = {cells[0].strip("`"): cells[1:] for cells in rows_of_page() if cells[0].startswith("`gaudi_spec:")}
    exported = {name if series.is_gauge else f"{name}_total": series for name, series in SERIES.items()}
    assert set(table) == set(exported)
    for name, series in exported.items():
        assert name in shown
        label, kind, meaning, _ = table[name]
        assert label.strip("`") == series.label
        assert kind == ("gauge" if series.is_gauge else "counter")
        assert meaning


def test_every_reason_is_explained() -> None:
    rows = [cells[0].strip("`") for cells in rows_of_page() if re.fullmatch(r"`[a-z]+`", cells[0]) and cells[1]]
    assert rows == ["reason", *REASONS]
    assert re.findall(r"(\w+): ", SERIES["gaudi_spec:rows_without_drafts"].help) == list(REASONS)


def test_results_and_causes_of_audits_are_explained() -> None:
    page = (PAGE.parent / "audit.md").read_text()
    rows = re.findall(r"^\| `([a-z]+)`", page.split("## What is compared")[0], re.M)
    assert rows == ["result", *AUDIT_RESULTS, "cause", *AUDIT_REASONS]
    for name, values in ((AUDITS, AUDIT_RESULTS), (AUDITS_SKIPPED, AUDIT_REASONS)):
        assert re.findall(r"([a-z]+): ", SERIES[name].help) == list(values)


def test_the_dashboard_is_one() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert board["uid"]
    assert board["schemaVersion"] >= 39
    assert "id" not in board, "that is another one in each Grafana"
    variables = {variable["name"]: variable["type"] for variable in board["templating"]["list"]}
    assert variables["datasource"] == "datasource"
    for use in (use for panel in panels() for expression in panel.expressions for use in uses(expression)):
        assert use.labels >= {"model_name", "instance", "engine"}, f"{use.name} is not narrowed by every variable"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) > 15
    for panel in board["panels"]:
        if panel["type"] == "row":
            continue
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}
        assert {name for target in panel["targets"] for name in re.findall(r"\$(\w+)", target["expr"])} <= {
            *variables,
            "__rate_interval",
        }
        legends = [name for target in panel["targets"] for name in re.findall(r"{{(\w+)}}", target["legendFormat"])]
        for target, name in itertools.product(panel["targets"], legends):
            assert f"by ({name})" in target["expr"]


def test_no_panel_covers_another() -> None:
    board = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in board["panels"]):
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


@pytest.mark.slow
def test_grafanas_own_models_hold_all_of_it() -> None:
    """Read by them and written again nothing is missing: a field that Grafana does not have would be."""
    python = clients_python()

    def read_again(board: dict[str, Any]) -> Any:
        code = (
            "import json, sys\n"
            "from grafana_foundation_sdk.cog.encoder import JSONEncoder\n"
            "from grafana_foundation_sdk.cog.plugins import register_default_plugins\n"
            "from grafana_foundation_sdk.models.dashboard import Dashboard\n"
            "register_default_plugins()\n"
            "print(JSONEncoder().encode(Dashboard.from_json(json.load(sys.stdin))))\n"
        )
        return json.loads(subprocess.check_output([python, "-c", code], input=json.dumps(board), text=True))

    board = json.loads(DASHBOARD.read_text())
    assert missing(board, read_again(board)) == []
    board["panels"][1]["options"]["legend"]["colour"] = "red"
    board["panels"][1]["targets"][0]["expression"] = board["panels"][1]["targets"][0].pop("expr")
    places = ["panels/1/options/legend/colour", "panels/1/targets/0/expression"]
    assert missing(board, read_again(board)) == places


def missing(wanted: Any, found: Any, place: str = "") -> list[str]:
    """What is not there, or is another; more may be, for fields that have a default."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        pairs = [(key, value, found.get(key)) for key, value in wanted.items()]
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        pairs = [(str(index), *both) for index, both in enumerate(zip(wanted, found, strict=True))]
    else:
        return [] if wanted == found else [place]
    return [one for key, *both in pairs for one in missing(*both, f"{place}/{key}".lstrip("/"))]


def test_the_page_has_queries() -> None:
    assert len([use for query in queries_of_page() for use in uses(query)]) > 8


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
        'sum by (instance) (rate(vllm:made_total{job="vllm"}[5m]))',
        "increase(vllm:made_total{}[10m]) > 0",
        "max by (engine) (vllm:usage{}) / on () group_left () sum(rate(vllm:made_total{}[5m]))",
        "max by (engine) (vllm:usage) / ignoring (engine) group_left sum without (engine) (rate(vllm:made_total[5m]))",
        'max by (instance) (vllm:usage{engine="${engine}"} * on (engine) group_left (instance) vllm:usage)',
        "topk(2, -vllm:usage) and on (engine) (irate(vllm:made_total[5m]) > 1)",
        "max_over_time(vllm:usage[$__rate_interval])",
    ],
)
def test_what_is_right_passes(expression: str) -> None:
    assert check(expression, families()) <= {"vllm:made_total", "vllm:usage"}


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("rate(vllm:made{}[5m])", "no series vllm:made"),
        ("sum(vllm:made_total{})", "only grows"),
        ("rate(vllm:usage{}[5m])", "is a gauge"),
        ("max_over_time(vllm:made_total[5m])", "only grows"),
        ("vllm:usage{}[5m]", "a window belongs"),
        ('rate(vllm:made_total{reason="x"}[5m])', "no label {'reason'}"),
        ("sum by (reason) (rate(vllm:made_total{}[5m]))", "no label {'reason'}"),
        ("sum by (engine) (vllm:usage{}) + sum by (x) (vllm:usage{})", "no label {'x'}"),
        ("sum by (engine) (sum(vllm:usage))", "no label {'engine'}"),
        ("sum by (engine) (max without (engine) (vllm:usage))", "no label {'engine'}"),
        ("sum by (engine) (vllm:usage / on (instance) vllm:usage)", "no label {'engine'}"),
        ("vllm:usage / on (x) vllm:usage", "no label {'x'}"),
        ("vllm:usage * on (engine) group_left (x) vllm:usage", "no label {'x'}"),
        ("histogram_quantile(0.5, sum(rate(vllm:made_total[5m])))", "no label {'le'}"),
        ("vllm:usage{} + up", "no series up"),
        ('{__name__="vllm:usage"}', "without a name"),
        ("rate(vllm:made_total[5m:1m])", "not known here: SubqueryExpr"),
        ("1 + 1", "no series"),
    ],
)
def test_what_is_wrong_fails(expression: str, wrong: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(wrong)):
        check(expression, families())


@pytest.mark.parametrize(
    "expression",
    [
        "sum(vllm:usage{}",
        "sum(vllm:usage))",
        "average(vllm:usage{})",
        "rate(vllm:made_total{})",
        "sum by (engine) rate(vllm:made_total{}[5m])",
        "sum by engine (vllm:usage)",
        "rate(vllm:made_total{}[5m]) rate(vllm:made_total{}[5m])",
        "vllm:usage{engine=0}",
        "vllm:usage / group_left () vllm:usage",
    ],
)
def test_what_is_no_promql_fails(expression: str) -> None:
    with pytest.raises(ValueError):
        check(expression, families())


def test_a_number_of_now_may_be_a_counter() -> None:
    check("max by (engine) (vllm:made_total{})", families(), is_number=True)

"""Lines on the page: speedup against concurrency; what is drawn, and where."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.records import run, task
from vllm_gaudi_spec.tools.report import page


def at(concurrency: int, model: str = "/models/target", **speeds: float) -> dict[str, Any]:
    made = run(task("baseline", 40.0, k=0), *(task(name, 40.0 * ratio) for name, ratio in speeds.items()), model=model)
    made["settings"]["batch_size"] = concurrency
    return made


def drawing(*records: dict[str, Any]) -> dict[str, Any]:
    panel = page.of_runs(list(records))
    assert panel is not None
    return page.drawing(panel)


def test_a_line_for_each_way_and_k() -> None:
    three = task("ngram", 50.0, k=3, acc_counts=[3, 2, 1], accepted_lengths=[1, 1, 1, 1])
    other = run(task("baseline", 40.0, k=0), three)
    other["settings"]["batch_size"] = 2
    panel = page.of_runs([at(8, ngram=0.75, draft_model=1.0), at(1, ngram=1.5), other])
    assert panel is not None
    assert {name: [point[:2] for point in line] for name, line in panel.lines.items()} == {
        "ngram, k = 2": [(1, 1.5), (8, 0.75)],
        "draft_model, k = 2": [(8, 1.0)],
        "ngram, k = 3": [(2, 1.25)],
    }
    assert panel.lines["ngram, k = 2"][0][2:] == (1.25, 2.0), "the quartiles"


@pytest.mark.parametrize(
    "records",
    [[at(1, ngram=1.5)], [at(1, ngram=1.5), at(1, ngram=1.6)], [at(1, ngram=1.5), at(8, "/models/other", ngram=1.0)]],
    ids=["one run", "one concurrency", "two models"],
)
def test_nothing_to_draw(records: list[dict[str, Any]]) -> None:
    assert page.of_runs(records) is None
    assert 'svg class="curves' not in page.render([page.Run(str(i), one) for i, one in enumerate(records)])


def test_lines_that_are_not_drawn_are_counted() -> None:
    speeds = {f"way{i}": 1.5 for i in range(page.LINES + 2)}
    made = [at(1, **speeds), at(8, **speeds)]
    drawn = drawing(*made)
    assert (len(drawn["lines"]), drawn["left_out"]) == (page.LINES, 2)
    assert "2 more are not drawn" in page.render([page.Run(str(i), one) for i, one in enumerate(made)])


def test_heights_and_words() -> None:
    drawn = drawing(at(1, ngram=1.5, draft_model=1.5), at(8, ngram=0.75, draft_model=0.8))
    values = {float(text): y for y, text in drawn["ticks"]}
    assert min(values) == 0
    assert max(values) >= 2.0, "the upper quartile of 1.5 is shown"
    assert drawn["even"] == pytest.approx(values[1.0])
    (_, y, low, high), (_, later, _, _) = drawn["lines"][0]["points"]
    assert low > y > high == pytest.approx(values[2.0])
    assert (drawn["bottom"] - later) / (drawn["bottom"] - y) == pytest.approx(0.5)
    assert "ngram, k = 2: 1.50 at concurrency 1, 0.75 at concurrency 8" in drawn["words"]

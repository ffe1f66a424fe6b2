"""Cells of the cost model are read from the reports of other benchmarks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import cost_model
from cost_model import Cell

MACHINE = {"accelerator": "NVIDIA H100 80GB HBM3"}


def report(rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"size": "8b", "machine": MACHINE, "rows": rows} | more


VERIFY = report(
    [{"batch": 1, "context": 512, "k": k, "plain_ms": 6.0, "verify_ms": 6.0 + k, "verify_ratio": 1.0} for k in (1, 4)]
)
STEPS = {"plain_ms": 6.5, "verify_ms": 7.0, "draft_ms": 3.25}
END_TO_END = report([{"batch": 8, "tokens_per_step": 2.5, **STEPS}], prompt=512, steps=40, k=4)
CUDA_UPSTREAM = report(
    [
        {
            "method": "no speculation",
            "prompt": 512,
            "cells": [
                {"batch": 8, "sampling": "greedy", "prompt_ms": {"ours": 200.0, "upstream, newer": 210.0}},
                {"batch": 8, "sampling": "sampled", "prompt_ms": {"ours": 300.0}},
            ],
        },
        {"method": "ngram", "prompt": 512, "cells": [{"batch": 1, "sampling": "greedy", "prompt_ms": {"ours": 1.0}}]},
    ]
)


def test_each_report_has_its_cells() -> None:
    assert cost_model.cells_of(VERIFY) == [
        Cell("h100", "plain", 1, 512, 0, 6.0),
        Cell("h100", "verify", 1, 512, 1, 7.0),
        Cell("h100", "verify", 1, 512, 4, 10.0),
    ]
    assert cost_model.cells_of(END_TO_END | {"size": "1.5b"}) == [
        Cell("h100", "plain", 8, 532, 0, 6.5, "1.5b"),
        Cell("h100", "verify", 8, 562, 4, 7.0, "1.5b"),
        Cell("h100", "draft", 8, 562, 4, 3.25, "1.5b"),
    ]
    assert cost_model.cells_of(CUDA_UPSTREAM) == [Cell("h100", "prompt and 16 tokens", 8, 520, 0, 200.0)]


def test_they_replace_those_of_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = tmp_path / "cells.json"
    stored.write_text(cost_model.CELLS.read_text())
    monkeypatch.setattr(cost_model, "CELLS", stored)
    before = [cell for cell in cost_model.every_cell() if cell.card == "h200"]
    paths = []
    for number, found in enumerate((VERIFY, END_TO_END, CUDA_UPSTREAM)):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(found))
    assert cost_model.take_measured(paths) == "h100"
    assert [cell for cell in cost_model.every_cell() if cell.card == "h200"] == before
    fitted, held_out = cost_model.cells("h100")
    assert [cell.card for cell in fitted] == ["h100"] * 4
    assert len(held_out) == 3 + len(before)


@pytest.mark.parametrize("change", [{"size": "tiny"}, {"machine": {"accelerator": "NVIDIA L4"}}, {"machine": {}}])
def test_other_reports_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="a report of"):
        cost_model.cells_of(VERIFY | change)

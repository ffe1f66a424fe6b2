"""`make verify-upstream` runs vLLM's tests on two platforms and compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.upstream import __main__ as upstream
from tests.upstream import adapter
from tests.upstream.__main__ import OURS, UPSTREAM, File, compare

CURRENT = {OURS: "now", UPSTREAM: "now"}
FILE = File("v1/test_x.py", differs={"test_kv*": "KV transfer is refused"})


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(upstream, "STATE", tmp_path)
    return tmp_path


def write(side: str, outcomes: dict[str, str], file: File = FILE, **given: Any) -> None:
    cases = {case: {"outcome": outcome, "seconds": 1, "message": "why"} for case, outcome in outcomes.items()}
    file.results(side).parent.mkdir(parents=True, exist_ok=True)
    found = {"key": "now", "cases": cases, "asked": None, "running": None, "ended": True}
    upstream.write_json(file.results(side), found | given)


def test_every_listed_file_has_cases_and_each_difference_a_reason() -> None:
    selection = upstream.read_selection(Path(upstream.__file__).with_name("selection.toml"))
    assert len({file.name for file in selection.files}) == len(selection.files) >= 60
    reasons = [reason for file in selection.files for reason in file.differs.values()]
    assert all([*reasons, *selection.refused.values()])
    names = [name for meant in selection.models.values() for name in meant]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("here", "there", "verdict"),
    [
        ({"test_a": "passed"}, {}, "equal"),
        ({"test_a": "failed"}, {"test_a": "failed"}, "equal"),
        ({"test_a": "failed"}, {"test_a": "skipped"}, "equal"),
        ({"test_a": "failed"}, {"test_a": "passed"}, "1 NEW"),
        ({"test_a": "skipped"}, {"test_a": "passed"}, "1 NEW"),
        ({"test_kv[1]": "failed", "test_a": "failed"}, {"test_kv[1]": "passed", "test_a": "passed"}, "1 NEW, 1 known"),
        ({"test_a": "failed"}, None, "not over"),
        ({adapter.COLLECTION: "failed"}, {"test_a": "passed", "test_b": "failed"}, "1 NEW"),
    ],
)
def test_only_what_passes_upstream_and_not_here_is_a_difference(
    here: dict[str, str], there: dict[str, str] | None, verdict: str
) -> None:
    file = FILE if "known" in verdict else File("v1/test_y.py")
    write(OURS, here, file)
    if there is not None:
        write(UPSTREAM, there, file, asked=[case for case in here if case != adapter.COLLECTION])
    row = compare(file, CURRENT, {})
    assert row.verdict == verdict
    assert set(row.new.values()) <= {"why"}
    assert row.is_over == (verdict != "not over")


@pytest.mark.parametrize(("keep", "left"), [(False, {}), (True, {"test_a": "passed"})])
def test_results_of_another_checkout_are_dropped_unless_kept(keep: bool, left: dict[str, str]) -> None:
    write(OURS, {"test_a": "passed"}, key="earlier")
    assert compare(FILE, CURRENT, {}).is_stale
    upstream.start([FILE], OURS, CURRENT, keep)
    assert {case: found["outcome"] for case, found in FILE.read(OURS)["cases"].items()} == left
    assert compare(FILE, CURRENT, {}).is_stale == keep


TESTS = """
import os
def test_passes(): pass
def test_fails(): assert 1 == 2
def test_ends_the_process(): os._exit(7)
def test_comes_after(): pass
def test_is_left_out(): pass
"""
# This module stands in for vLLM, whose plugins the adapter loads.
PLUGINS = "def load_general_plugins(): pass\n"


def test_an_ended_process_costs_one_case_and_an_interruption_none(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests, site = state / "source" / "tests", state / "source" / "vllm"
    tests.mkdir(parents=True)
    site.mkdir()
    (tests / "test_x.py").write_text(TESTS)
    (site / "__init__.py").write_text("")
    (site / "plugins.py").write_text(PLUGINS)
    file = File("test_x.py", without=("test_is_left_out",))
    write(OURS, {"test_fails": "passed"}, file, ended=False)  # from an interrupted run
    upstream.run_folder(Path(), [file], CURRENT, keep=False, deadline=float("inf"))
    found = file.read(OURS)
    assert {case: result["outcome"] for case, result in found["cases"].items()} == {
        "test_fails": "passed",
        "test_passes": "passed",
        "test_ends_the_process": "failed",
        "test_comes_after": "passed",
    }
    assert found["ended"]
    assert found["cases"]["test_ends_the_process"]["message"] == "the process ended with status 7"
    there = {case: result["outcome"] for case, result in file.read(UPSTREAM)["cases"].items()}
    assert there == {"test_ends_the_process": "failed"}
    assert compare(file, CURRENT, {}).verdict == "equal"

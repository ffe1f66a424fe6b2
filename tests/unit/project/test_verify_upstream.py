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


def test_a_mistyped_key_of_the_selection_is_named(tmp_path: Path) -> None:
    path = tmp_path / "selection.toml"
    path.write_text('[models]\n[refused]\n[files]\n"a.py" = {onyl = ["test_a"]}\n"b.py" = {}\n')
    with pytest.raises(ValueError, match=r"a\.py has unknown keys: onyl"):
        upstream.read_selection(path)
    path.write_text('[models]\ntarget = ["a/b"]\n[refused]\n"x" = "y"\n[files]\n"b.py" = {only = ["test_a"]}\n')
    assert upstream.read_selection(path) == upstream.Selection(
        [File("b.py", only=("test_a",))], {"target": ["a/b"]}, {"x": "y"}
    )


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


def test_a_case_that_ends_with_a_listed_refusal_is_a_known_difference() -> None:
    write(OURS, {"test_a": "failed"})
    write(UPSTREAM, {"test_a": "passed"}, asked=["test_a"])
    assert compare(FILE, CURRENT, {"why": "it is refused"}).differences == {"test_a": "it is refused"}
    assert compare(FILE, CURRENT, {"something else": "it is refused"}).new == {"test_a": "why"}


def test_a_listed_difference_that_is_none_any_more_is_said() -> None:
    write(OURS, {"test_kv[1]": "passed"})
    assert compare(FILE, CURRENT, {}).verdict == "listed, but equal: test_kv*"


def test_upstream_runs_what_does_not_pass_here_and_no_more() -> None:
    write(OURS, {"test_a": "failed", "test_b": "passed", "test_c": "skipped"})
    assert upstream.needed(FILE, UPSTREAM) == ["test_a", "test_c"]
    write(UPSTREAM, {"test_a": "passed"}, asked=["test_a"])
    assert not upstream.is_over(FILE, UPSTREAM)
    write(UPSTREAM, {"test_a": "passed"}, asked=["test_a", "test_c"])  # it has no such case there
    assert upstream.is_over(FILE, UPSTREAM)
    write(OURS, {adapter.COLLECTION: "failed"})
    assert upstream.needed(FILE, UPSTREAM) is None


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

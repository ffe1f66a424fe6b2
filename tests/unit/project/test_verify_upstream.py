"""`make verify-upstream` runs vLLM's tests on two platforms and compares them."""

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

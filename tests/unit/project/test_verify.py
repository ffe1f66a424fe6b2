"""`make verify`, `make verify-gaudi`, `make verify-ascend` and `make verify-upstream`."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import verify, verify_device
from tests.upstream import __main__ as upstream
from tests.upstream import adapter
from tests.upstream.__main__ import OURS, UPSTREAM, File, compare

JOBS = verify.all_jobs()
EMULATED = {"hpu-emulated", "hpu-emulated, compiled", "ascend-emulated"}
DEVICES_BY_MARK = {"emulated": EMULATED, "ascend": {"ascend-emulated"}, "cuda": {"cuda"}}
# A mode and QUANT_CONFIG are a Gaudi's alone; a card's memory is counted where it captures graphs.
EXCEPTIONS = {f"test_{name}.py": {"hpu-emulated"} for name in ("emulated_compiled", "emulated_fp8", "vendor_torch")} | {
    "test_emulated_memory.py": {"hpu-emulated", "ascend-emulated"}
}
FULL_TESTS = sorted({job.file for job in JOBS if job.file.parent.name == "full_tests"})


@pytest.mark.parametrize("file", FULL_TESTS, ids=lambda file: file.stem)
def test_full_tests_run_where_they_belong(file: Path) -> None:
    marks = [mark for mark in DEVICES_BY_MARK if re.search(rf"^pytestmark = .*\.{mark}\b", file.read_text(), re.M)]
    wanted: set[str | None] = {None}
    if marks:
        wanted = set(EXCEPTIONS.get(file.name, DEVICES_BY_MARK[marks[0]]))
    jobs = [job for job in JOBS if job.file == file]
    assert {job.device for job in jobs} == wanted
    for job in jobs:
        if job.device is not None:
            device, _, mode = job.device.partition(", ")
            environment = job.environment()
            assert (environment["VGS_DEVICE"], environment["PT_HPU_LAZY_MODE"]) == (device, "0" if mode else "1")


def counted(compiles: int, **counts: int | None) -> dict[str, object]:
    phase = {"compiles": compiles, "steps": 4, "runner_syncs": 4, "fallbacks": 0, **counts}
    graphs = {"signatures": 5, "unexpected": [], "compiles_until_ready": 7}
    return {"graphs": graphs, "phases": {"mixed": phase, "prompt log-probabilities": phase}, "findings": []}


def card_and_emulated() -> tuple[dict[str, Any], dict[str, Any]]:
    return counted(0, host_syncs=None, kv_bytes_read=None), counted(0, host_syncs=4, kv_bytes_read=200)


def test_comparison_of_card_and_emulation() -> None:
    rows = verify_device.compare(*card_and_emulated())
    conclusions = {row.name: row.conclusion for row in rows}
    assert conclusions["KV bytes read"] == conclusions["device-to-host syncs, all"] == verify_device.NOT_COUNTED
    assert {conclusion for conclusion in conclusions.values() if conclusion != verify_device.NOT_COUNTED} == {"equal"}
    assert verify_device.agrees(rows)


def test_a_difference_that_matters() -> None:
    card, emulated = card_and_emulated()
    card["phases"]["mixed"]["compiles"] = 2
    card["phases"]["mixed"]["steps"] += 1
    rows = {row.name: row for row in verify_device.compare(card, emulated)}
    assert rows["graphs compiled after warm-up"].conclusion == "DIFFERENT"
    assert rows["steps"].conclusion == "different"
    assert not verify_device.agrees(list(rows.values()))


@pytest.mark.parametrize("device", verify_device.DEVICES.values(), ids=lambda device: device.name)
def test_without_a_card_it_is_an_error(
    device: verify_device.Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_device.device_table, "has_card", lambda card: False)
    monkeypatch.setattr(sys, "argv", ["verify_device.py", device.name])
    assert verify_device.main() == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: there is no {device.kind} here: verify-{device.name} needs a card")
    assert said.count("\n") == 1


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

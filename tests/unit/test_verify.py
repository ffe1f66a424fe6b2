"""`make verify` runs each file of tests on the devices that it needs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import verify

JOBS = verify.all_jobs()
EMULATED = {"hpu-emulated", "ascend-emulated"}
DEVICES_BY_MARK = {"emulated": EMULATED, "ascend": {"ascend-emulated"}, "cuda": {"cuda"}}
# QUANT_CONFIG is refused elsewhere.
EXCEPTIONS = {"test_emulated_fp8.py": {"hpu-emulated"}}
FULL_TESTS = sorted({job.file for job in JOBS if job.file.parent.name == "full_tests"})


def test_jobs_do_not_share_results() -> None:
    assert len({job.stem for job in JOBS}) == len({job.name for job in JOBS}) == len(JOBS)


@pytest.mark.parametrize("file", FULL_TESTS, ids=lambda file: file.stem)
def test_full_tests_run_where_they_belong(file: Path) -> None:
    marks = [mark for mark in DEVICES_BY_MARK if re.search(rf"^pytestmark = .*\.{mark}\b", file.read_text(), re.M)]
    wanted: set[str | None] = {None}
    if marks:
        wanted = set(EXCEPTIONS.get(file.name, DEVICES_BY_MARK[marks[0]]))
    jobs = [job for job in JOBS if job.file == file]
    assert {job.device for job in jobs} == wanted
    assert all(job.device is None or job.environment()["VGS_DEVICE"] == job.device for job in jobs)


def test_all_others_run_on_the_device_that_is_chosen() -> None:
    assert {job.device for job in JOBS if job.file not in FULL_TESTS} == {None}


def test_what_runs_beside_other_releases_has_a_python_and_an_environment_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[list[str]] = []

    def run(command: list[str], **named: object) -> SimpleNamespace:
        made.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("tests.verify.subprocess.run", run)
    monkeypatch.setenv("VGS_DEVICE", "cpu")
    monkeypatch.setenv("VLLM_PLUGINS", "gaudi_spec")
    beside = [job for job in JOBS if job.file.parent == verify.ROOT / "tests" / "integrations"]
    assert {job.file.name for job in beside} == {
        "test_doubles.py",
        "test_vllm_ascend_patches.py",
        "test_vllm_ascend_proposer.py",
    }
    for job in beside:
        assert not {"VGS_DEVICE", "VLLM_PLUGINS"} & job.environment().keys()
        assert verify.python_for(job) == str(verify.STATE / "vllm-ascend" / "bin" / "python")
    assert [command[-2:] for command in made] == [["vllm-ascend", str(verify.STATE / "vllm-ascend")]] * len(beside)
    other = next(job for job in JOBS if job not in beside)
    assert verify.python_for(other) == sys.executable
    assert other.environment()["VLLM_PLUGINS"] == "gaudi_spec"

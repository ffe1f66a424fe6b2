"""`make verify` runs each file of tests on the devices that it needs."""

from __future__ import annotations

from pathlib import Path

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
    marks = [mark for mark in DEVICES_BY_MARK if f"\npytestmark = pytest.mark.{mark}\n" in file.read_text()]
    wanted: set[str | None] = {None}
    if marks:
        wanted = set(EXCEPTIONS.get(file.name, DEVICES_BY_MARK[marks[0]]))
    jobs = [job for job in JOBS if job.file == file]
    assert {job.device for job in jobs} == wanted
    assert all(job.device is None or job.environment()["VGS_DEVICE"] == job.device for job in jobs)


def test_all_others_run_on_the_device_that_is_chosen() -> None:
    assert {job.device for job in JOBS if job.file not in FULL_TESTS} == {None}


def test_tests_beside_other_releases_are_among_them() -> None:
    assert any("integrations" in job.file.parts for job in JOBS)

"""`make verify` runs each file of tests on the devices that it needs."""

from __future__ import annotations

import pytest

from tests import verify

JOBS = verify.all_jobs()
DEVICES_BY_MARK = {
    "emulated": {"hpu-emulated", "ascend-emulated"},
    "ascend": {"ascend-emulated"},
    "cuda": {"cuda"},
}


def test_jobs_do_not_share_results() -> None:
    assert len({job.stem for job in JOBS}) == len({job.name for job in JOBS}) == len(JOBS)


@pytest.mark.parametrize("mark", DEVICES_BY_MARK)
def test_marked_files_run_where_they_belong(mark: str) -> None:
    full = [job for job in JOBS if job.file.parent.name == "full_tests"]
    marked = [job for job in full if f"\npytestmark = pytest.mark.{mark}\n" in job.file.read_text()]
    assert {job.device for job in marked} == DEVICES_BY_MARK[mark]
    assert all(job.environment()["VGS_DEVICE"] == job.device for job in marked)


def test_all_others_run_on_the_device_that_is_chosen() -> None:
    for job in JOBS:
        if not any(f"\npytestmark = pytest.mark.{mark}\n" in job.file.read_text() for mark in DEVICES_BY_MARK):
            assert job.device is None, job.name

"""`make verify` runs each file of tests on the devices that it needs."""

import re
from pathlib import Path

import pytest

from tests import verify

JOBS = verify.all_jobs()
EMULATED = {"hpu-emulated", "hpu-emulated, compiled", "ascend-emulated"}
DEVICES_BY_MARK = {"emulated": EMULATED, "ascend": {"ascend-emulated"}, "cuda": {"cuda"}}
# A mode, QUANT_CONFIG and recurrent layers are a Gaudi's alone; a card's memory is counted where it captures graphs.
EXCEPTIONS = {
    f"test_{name}.py": {"hpu-emulated"}
    for name in ("emulated_compiled", "emulated_fp8", "emulated_images", "emulated_recurrent", "vendor_torch")
} | {"test_emulated_memory.py": {"hpu-emulated", "ascend-emulated"}}
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

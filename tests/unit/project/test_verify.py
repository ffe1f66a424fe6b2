"""`make verify` runs each file of tests on the devices that it needs."""

from __future__ import annotations

import re
import subprocess
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


@pytest.mark.parametrize("has_git", [True, False], ids=["checkout", "archive"])
def test_a_pass_counts_for_the_files_that_it_was_seen_with(
    has_git: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New files too, and those that only some test reads; not what git ignores."""
    monkeypatch.setattr(verify, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / ".gitignore").write_text("__pycache__/\n.verify/\n")
    if has_git:
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
        subprocess.run(["git", "add", "pyproject.toml"], cwd=tmp_path, check=True)
    seen = {verify.tree_hash()}
    read = ["Makefile", "SECURITY.md", "Dockerfile", "mkdocs.yml", ".dockerignore", "examples/serve.sh", "docs/a/b.md"]
    for count, name in enumerate([*read, *read], 2):  # made, then changed
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"change {count}")
        seen.add(verify.tree_hash())
        assert len(seen) == count, name
    (tmp_path / "Makefile").rename(tmp_path / "Makefile.old")
    seen.add(verify.tree_hash())
    assert len(seen) == 2 + 2 * len(read)
    for name in (".verify/x.json", "docs/__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
        assert verify.tree_hash() in seen, name

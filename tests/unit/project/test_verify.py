"""`make verify` runs each file of tests on the devices that it needs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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
    for job in jobs:
        if job.device is not None:
            device, _, mode = job.device.partition(", ")
            environment = job.environment()
            assert (environment["VGS_DEVICE"], environment["PT_HPU_LAZY_MODE"]) == (device, "0" if mode else "1")


def test_those_of_the_emulated_cann_run_there() -> None:
    assert {job.device for job in JOBS if job.file.parent.name == "emulated_cann"} == {"ascend-emulated"}


def test_all_others_run_on_the_device_that_is_chosen() -> None:
    named = {*FULL_TESTS, *(verify.ROOT / "tests" / "emulated_cann").glob("test_*.py")}
    assert {job.device for job in JOBS if job.file not in named} == {None}


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
        "test_vllm_ascend_engine.py",
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


def test_what_lies_beside_code_and_tests_counts() -> None:
    names = {str(path.relative_to(verify.ROOT)) for path in verify.sources()}
    assert names >= {"Makefile", "mkdocs.yml", "SECURITY.md", "CHANGELOG.md", "Dockerfile", "examples/README.md"}

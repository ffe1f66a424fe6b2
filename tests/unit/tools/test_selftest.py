"""`gaudi-spec selftest`: its process, its table, its JSON and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT
from tests.unit.self_test.test_start import result
from vllm_gaudi_spec.self_test import run
from vllm_gaudi_spec.tools import cli, selftest
from vllm_gaudi_spec.tools.io import output


def test_its_log_is_not_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(output, "run_module", lambda *words: started.extend(words) or 0)
    arguments = ["selftest", "--dtype", "float32"]
    assert cli.main(arguments) == 0
    variables = {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_LOGGING_LEVEL": "WARNING"}
    assert started == ["vllm_gaudi_spec.tools.selftest", variables, arguments]


def checked(monkeypatch: pytest.MonkeyPatch, found: Any, *arguments: str) -> int:
    def check(dtype: str) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(selftest, "check_device", check)
    return selftest.run_checks(cli.make_parser().parse_args(["selftest", *arguments]))


def test_passed_checks_are_status_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(monkeypatch, result(None)) == 0
    assert "15 checks passed" in capsys.readouterr().out.splitlines()[-1]


def test_a_failed_check_is_status_1_with_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(monkeypatch, result(run.DOWNLOADS)) == 1
    printed = capsys.readouterr().out
    assert "set --no-async-scheduling" in printed
    assert printed.endswith("1 failed\n")
    assert checked(monkeypatch, result(run.DOWNLOADS), "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["mode"], found["dtype"], found["passed"]) == ("hpu", "lazy", "bfloat16", False)
    by_name = {check["name"]: check for check in found["checks"]}
    assert list(by_name) == [check.name for check in run.CHECKS]
    assert by_name[run.DOWNLOADS]["advice"] == "set --no-async-scheduling"
    assert {check["status"] for check in by_name.values()} == {"passed", "failed"}


def test_a_device_that_does_not_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    error = RuntimeError("synStatus=20 [Device already acquired]\nDevice acquire failed")
    assert checked(monkeypatch, error) == 1
    assert "[Device already acquired] Device acquire failed" in capsys.readouterr().err
    with pytest.raises(RuntimeError):
        checked(monkeypatch, error, "--verbose")


def test_a_device_that_does_not_exist(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VGS_DEVICE", "gaudi")
    assert selftest.run_checks(cli.make_parser().parse_args(["selftest"])) == 1
    assert "VGS_DEVICE=gaudi is not available" in capsys.readouterr().err


def test_on_the_cpu(tmp_path: Path) -> None:
    """The whole of it, by the only file of the output."""
    command = [sys.executable, "-m", "vllm_gaudi_spec.tools.cli", "selftest", "--json"]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "VGS_DEVICE": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["device"], found["passed"]) == ("cpu", True)
    assert sum(check["status"] == "passed" for check in found["checks"]) == 12

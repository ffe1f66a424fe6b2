"""`gaudi-spec selftest`: its process, its table, its JSON and its exit status."""

import json
from typing import Any

import pytest

from tests.unit.self_test.test_start import result
from vllm_gaudi_spec.self_test import run
from vllm_gaudi_spec.tools import cli, selftest


def checked(monkeypatch: pytest.MonkeyPatch, found: Any, *arguments: str) -> int:
    def check(dtype: str) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(selftest, "check_device", check)
    return selftest.run_checks(cli.make_parser().parse_args(["selftest", *arguments]))


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

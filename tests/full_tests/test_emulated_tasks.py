"""On an emulated card: each task of the script that users run says what the baseline says, with nothing made late."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.full_tests.test_spec_decode_script import SCRIPT, check_report, script
from vllm_gaudi_spec.config import requested_device

pytestmark = pytest.mark.emulated


def all_tasks() -> list[str]:
    """Read from the script, which only runs as one."""
    for node in ast.parse(SCRIPT.read_text()).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Dict)
            and ast.unparse(node.targets[0]) == "TASKS"
        ):
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise AssertionError("the script has no table of tasks")


# Its demo model is tiny: it takes seconds.
QUICK = ("medusa",)


@pytest.mark.parametrize(
    "task",
    [pytest.param(task, marks=pytest.mark.every_card if task in QUICK else pytest.mark.slow) for task in all_tasks()],
)
def test_a_task(task: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    status, said = script(
        *("--task", task, "--osl", "24", "--batch_size", "2", "--num_spec_tokens", "3", "--num_warmups", "0"),
        *(("--run_base",) if task != "baseline" else ()),
        *("--json", str(file)),
    )
    assert status == 0, said
    report: dict[str, Any] = json.loads(file.read_text())
    if task != "baseline":
        check_report(report, 3)
        assert report["matches_baseline"] == {"equal": 2, "tied": 0, "different": 0}
        nothing_late(report["baseline"])
    nothing_late(report)


def nothing_late(report: dict[str, Any]) -> None:
    assert report["device"] == requested_device()
    assert report["compiled_after_warmup"] == report["graphs"]["after_warmup"] == 0
    assert 0 < report["host_syncs_per_step"] <= 1

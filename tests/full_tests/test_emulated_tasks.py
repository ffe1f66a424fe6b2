"""On an emulated card: each task of the script that users run says what the baseline says, with nothing made late."""

from pathlib import Path

import pytest

from tests.full_tests.test_spec_decode_script import check_report, script, tasks_in
from tests.support.releases import only_0_32
from vllm_gaudi_spec.environment import DEVICE
from vllm_gaudi_spec.tools.compare.tasks import TASKS
from vllm_gaudi_spec.tools.report import record

pytestmark = pytest.mark.emulated

# Its demo model is tiny: seconds.
QUICK = ("medusa",)  # which vLLM 0.33 no longer has


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=only_0_32 if task in QUICK else pytest.mark.slow) for task in TASKS]
)
def test_task_equals_its_baseline(task: str, tmp_path: Path) -> None:
    check_task(task, tmp_path)


def check_task(task: str, tmp_path: Path, batch: int = 2, k: int = 3, **variables: str) -> None:
    """`variables`: of the script's environment."""
    file = tmp_path / "report.json"
    status, said = script(
        *("--task", task, "--osl", "24", "--batch_size", str(batch), "--num_spec_tokens", str(k), "--num_warmups", "0"),
        *(("--run_base",) if task != "baseline" else ()),
        *("--json", str(file)),
        **variables,
    )
    assert status == 0, said
    assert record.read(file)["device"]["device"] == DEVICE.value
    tasks = tasks_in(file)
    if task != "baseline":
        check_report(tasks[task], k)
        assert tasks[task]["matches_baseline"] == {"equal": batch, "tied": 0, "different": 0}
    assert set(tasks) == {"baseline", task}
    for report in tasks.values():
        assert report["compiled_after_warmup"] == report["graphs"]["after_warmup"] == 0
        assert 0 < report["host_syncs_per_step"] <= 1

"""The script that users run: its report, its exit status, and what it says when it cannot do what was asked."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import run
from vllm_gaudi_spec.tools.compare.measure import compute_speedup
from vllm_gaudi_spec.tools.report import record

SCRIPT = Path(__file__).with_name("spec_decode.py")
REPORTED = {
    *("task", "k", "batch_size", "tokens_per_s", "latency_s", "acc_counts", "acc_rate", "mean_accepted_length"),
    *("tokens_per_step", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "accepted_lengths", "answers"),
    *("matches_baseline", "graphs", "host_syncs_per_step"),
}

# The comparison is four engines of the demo model, one after the other: a minute on two cores that have nothing else to
# do.
_SECONDS = 1500
pytestmark = pytest.mark.timeout(2 * _SECONDS)


def script(*options: str, **variables: str) -> tuple[int, str]:
    """Exit status, and all that was printed. `variables`: of the environment, in place of this process's."""
    command = [sys.executable, str(SCRIPT), *options]
    # The engine in its own process, as users have it.
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= variables
    done = run(command, env=environment, timeout=_SECONDS)
    return done.returncode, done.stdout


def tasks_in(file: Path) -> dict[str, Any]:
    """Of the record that --json wrote, which is what `gaudi-spec report` reads."""
    written = record.read(file)
    assert written["command"][0] == "python"
    assert set(written["device"]) == {"device", "mode"}
    return written["tasks"]


def check_report(report: dict[str, Any], k: int) -> None:
    assert set(report) >= REPORTED
    drafted = [step[1] for answer in report["answers"] for step in answer["steps"]]
    assert sum(drafted) == report["num_accepted_tokens"], "each accepted draft is a token of an answer"
    assert sum(report["accepted_lengths"]) == report["num_drafts"]
    assert sum(length * steps for length, steps in enumerate(report["accepted_lengths"])) == sum(drafted)
    assert report["k"] == k
    assert len(report["acc_counts"]) == k
    assert report["acc_counts"] == sorted(report["acc_counts"], reverse=True)
    assert sum(report["acc_counts"]) == report["num_accepted_tokens"] > 0
    assert report["num_drafts"] <= report["num_draft_tokens"] <= k * report["num_drafts"]
    assert report["acc_rate"] == pytest.approx(report["num_accepted_tokens"] / report["num_draft_tokens"])
    # A step without a draft yields one token, so counting those as well lowers the mean.
    assert 1 < report["tokens_per_step"] <= report["mean_accepted_length"]
    assert report["graphs"]["warmup"] > 0
    assert report["graphs"]["after_warmup"] == 0
    assert 0 < report["host_syncs_per_step"] <= 1


@pytest.mark.slow  # CI runs the comparison below
@pytest.mark.parametrize("task", ["ngram", "suffix"])
def test_report_of_a_task(task: str, tiny_llama: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    status, said = script(
        *("--task", task, "--osl", "64", "--num_spec_tokens", "4", "--batch_size", "3", "--model", tiny_llama),
        *("--prompt_lookup_min", "1", "--run_base", "--json", str(file), "--do_profile", "--assert_accept_rate", "1.1"),
    )
    # No drafter reaches that rate, so the run fails behind its report.
    assert status == 1, said
    assert "acc_rate" in said.splitlines()[-1]
    assert "1.1" in said.splitlines()[-1]
    tasks = tasks_in(file)
    report = tasks[task]
    check_report(report, 4)
    assert report["matches_baseline"] == {"equal": 3, "tied": 0, "different": 0}
    assert len(report["answers"]) == 3
    assert [len(answer["pieces"]) for answer in report["answers"]] == [64] * 3
    assert Path(report["trace"]).parent == tmp_path
    assert Path(report["trace"]).stat().st_size > 1000
    assert list(tasks) == ["baseline", task]
    assert tasks["baseline"]["k"] == 0
    assert all(step == [1, 0] for answer in tasks["baseline"]["answers"] for step in answer["steps"])
    # A trace needs the engine in this process, where there is room for one.
    assert record.read(file)["measurement"] == {"turns": 1, "why_one_by_one": "the engine is in this process"}
    texts = [["".join(answer["pieces"]) for answer in one["answers"]] for one in tasks.values()]
    assert texts[0] == texts[1]
    assert all(prompt in said for prompt in ("Hello, my name is", "The capital of France is"))


def test_comparison_of_tasks(demo_model: str, tmp_path: Path) -> None:
    """The demo: all ways of drafting on the demo model with the drafters in demo/, and one table at the end."""
    file = tmp_path / "reports.json"
    status, said = script(
        *("--task", "compare", "--osl", "24", "--batch_size", "2", "--num_spec_tokens", "3", "--num_warmups", "0"),
        *("--turns", "2"),
        *("--prompt_lookup_min", "1", "--json", str(file), "--report", str(tmp_path / "report.html")),
    )
    assert status == 0, said
    assert said.splitlines()[-1] == f"report: {tmp_path / 'report.html'}"
    assert "universal_draft <small>k = 3</small>" in (tmp_path / "report.html").read_text()
    reports = tasks_in(file)
    assert list(reports) == ["baseline", "ngram", "draft_model", "universal_draft"]
    base = reports.pop("baseline")
    assert (base["k"], base["tokens_per_step"], base["matches_baseline"]) == (0, 1.0, None)
    table = table_in(said)
    assert table["baseline"] == ["1.00", "-", "1.00", "1.00", "-", "-"]
    assert "Each prompt was run 2 times, by all tasks" in said
    assert record.read(file)["measurement"] == {"turns": 2, "why_one_by_one": None}
    assert [len(turn) for turn in base["seconds"]] == [1, 1], "both prompts at once, twice"
    for name, report in reports.items():
        check_report(report, 3)
        assert report["matches_baseline"]["different"] == 0
        assert report["speedup"] == compute_speedup(base["seconds"], report["seconds"])
        verifications = ", ".join(f"{n} {verification}" for verification, n in report["matches_baseline"].items())
        assert table[name] == [
            f"{report['speedup']['ratio']:.2f}",
            "{low:.2f} to {high:.2f}".format(**report["speedup"]),
            f"{record.compute_acceptance_length(report):.2f}",
            f"{report['tokens_per_step']:.2f}",
            f"{report['acc_rate']:.3f}",
            verifications,
        ]
    assert all(reports[name]["tokens_per_step"] > 1.5 for name in ("draft_model", "universal_draft"))


def table_in(said: str) -> dict[str, list[str]]:
    """By task, the columns behind its speed."""
    lines = said.splitlines()
    header = next(i for i, line in enumerate(lines) if line.split()[:2] == ["task", "tokens/s"])
    rows = [re.split(r"  +", line, maxsplit=7) for line in lines[header + 1 : lines.index("", header)]]
    return {row[0]: row[2:] for row in rows}


@pytest.mark.slow  # CI runs one of them on an emulated card
@pytest.mark.parametrize("task", ["medusa", "eagle", "eagle3", "peagle", "dflash", "mtp"])
def test_demo_heads(task: str, tmp_path: Path) -> None:
    """The task's name is enough to choose a head, which drafts the default number of tokens."""
    file = tmp_path / "report.json"
    status, said = script("--task", task, "--osl", "24", "--batch_size", "4", "--run_base", "--json", str(file))
    assert status == 0, said
    report = tasks_in(file)[task]
    check_report(report, 4 if task == "medusa" else 5)
    assert report["matches_baseline"]["different"] == 0


@pytest.mark.slow
def test_comparison_goes_on_when_a_task_fails(tiny_llama: str, tmp_path: Path) -> None:
    """The others have their lines all the same."""
    file = tmp_path / "reports.json"
    drafter = SCRIPT.parents[2] / "demo" / "draft-other-vocab"
    status, said = script(
        *("--task", "draft_model", "ngram", "--osl", "16", "--batch_size", "2", "--model", tiny_llama),
        *("--draft_model", str(drafter), "--json", str(file)),
    )
    assert status == 1, said
    assert said.splitlines()[-1].startswith("error: task draft_model ngram failed: draft_model: ")
    assert list(table_in(said)) == list(tasks_in(file)) == ["baseline", "ngram"]

"""The script that users run: its report, its exit status, and what it says when it can not do what was asked."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("spec_decode.py")
REPORTED = {
    "task",
    "device",
    "mode",
    "k",
    "batch_size",
    "tokens_per_s",
    "latency_s",
    "acc_counts",
    "acc_rate",
    "mean_accepted_length",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "texts",
    "matches_baseline",
    "graphs",
    "host_syncs_per_step",
}


def script(*options: str) -> tuple[int, str]:
    """Exit status, and all that was printed."""
    command = [sys.executable, str(SCRIPT), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500)
    return done.returncode, done.stdout


def check_report(report: dict[str, Any], k: int) -> None:
    assert set(report) >= REPORTED
    assert report["k"] == k
    assert len(report["acc_counts"]) == k
    assert report["acc_counts"] == sorted(report["acc_counts"], reverse=True)
    assert sum(report["acc_counts"]) == report["num_accepted_tokens"] > 0
    assert report["num_drafts"] <= report["num_draft_tokens"] <= k * report["num_drafts"]
    assert report["acc_rate"] == pytest.approx(report["num_accepted_tokens"] / report["num_draft_tokens"])
    assert report["graphs"]["warmup"] > 0
    assert report["graphs"]["after_warmup"] == 0
    assert 0 < report["host_syncs_per_step"] <= 1


@pytest.mark.parametrize("task", ["ngram", pytest.param("suffix", marks=pytest.mark.slow)])
def test_report(task: str, tiny_llama: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    status, said = script(
        *("--task", task, "--osl", "64", "--num_spec_tokens", "4", "--batch_size", "3", "--model", tiny_llama),
        *("--prompt_lookup_min", "1", "--run_base", "--json", str(file), "--do_profile", "--assert_accept_rate", "1.1"),
    )
    # No drafter reaches that rate, so the run fails behind its report.
    assert status == 1, said
    assert "acc_rate" in said.splitlines()[-1]
    assert "1.1" in said.splitlines()[-1]
    report = json.loads(file.read_text())
    check_report(report, 4)
    assert report["matches_baseline"] == {"equal": 3, "tied": 0, "different": 0}
    assert len(report["texts"]) == 3
    assert Path(report["trace"]).parent == tmp_path
    assert Path(report["trace"]).stat().st_size > 1000
    assert report["baseline"]["k"] == 0
    assert all(prompt in said for prompt in ("Hello, my name is", "The capital of France is"))


@pytest.mark.slow
@pytest.mark.parametrize("how", [["strict"], ["block"], ["standard", "greedy"], ["synthetic"]])
def test_acceptance(how: list[str], tiny_llama: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    rates = ["--synthetic_rates", "0.9", "0.6"] if how == ["synthetic"] else []
    status, said = script(
        *("--task", "ngram", "--osl", "200", "--num_spec_tokens", "2", "--model", tiny_llama, "--json", str(file)),
        *("--prompt_lookup_min", "1", "--temperature", "0.8", "--run_base", "--acceptance", *how, *rates),
    )
    assert status == 0, said
    report = json.loads(file.read_text())
    check_report(report, 2)
    if rates:
        first, second = (count / report["num_drafts"] for count in report["acc_counts"])
        assert first == pytest.approx(0.9, abs=0.06)
        # Not every step drafts two tokens.
        assert second < 0.66
    else:
        assert report["matches_baseline"]["equal"] == 8


@pytest.mark.slow
def test_repetitive_prompts(demo_model: str, tmp_path: Path) -> None:
    """One request at a time, against the baseline in the same run."""
    file = tmp_path / "report.json"
    status, said = script(
        *("--task", "ngram", "--osl", "128", "--batch_size", "1", "--model", demo_model, "--json", str(file)),
        *("--prompts", str(SCRIPT.with_name("prompts")), "--run_base", "--assert_accept_rate", "0.5"),
    )
    assert status == 0, said
    report = json.loads(file.read_text())
    check_report(report, 5)
    assert report["matches_baseline"]["different"] == 0
    assert report["tokens_per_s"] > report["baseline"]["tokens_per_s"]


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--task", "ngram", "--draft_model", "some/model"], 2, "needs no draft model"),
        pytest.param(["--task", "ngram", "--acceptance", "synthetic"], 2, "--synthetic_rates", marks=pytest.mark.slow),
        pytest.param(["--task", "ngram", "--model", "/no/such"], 1, "/no/such", marks=pytest.mark.slow),
        pytest.param(["--task", "baseline", "--assert_accept_rate", "0.5"], 2, "drafts", marks=pytest.mark.slow),
        pytest.param(["--task", "ngram", "--acceptance", "strict", "block"], 2, "one rule", marks=pytest.mark.slow),
        pytest.param(["--task", "ngram", "--prompts", "/no/such"], 1, "/no/such", marks=pytest.mark.slow),
        pytest.param(["--task", "ngram", "--limit", "5"], 2, "--accuracy_rate", marks=pytest.mark.slow),
        pytest.param(["--task", "ngram", "--acceptance", "coupled"], 1, "use greedy", marks=pytest.mark.slow),
    ],
)
def test_refusals(options: list[str], status: int, words: str) -> None:
    found, said = script(*options)
    assert found == status, said
    assert words in said.splitlines()[-1], said


@pytest.mark.slow
def test_accuracy_without_lm_eval() -> None:
    """Asked for before anything is loaded."""
    pytest.importorskip("vllm")
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        status, said = script("--task", "ngram", "--accuracy_rate", "0.3")
        assert status == 1
        assert "lm-eval" in said.splitlines()[-1]
    else:
        pytest.skip("lm-eval is installed")

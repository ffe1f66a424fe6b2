"""calibration/choose_speculation.py as users run it, on tiny models; what it writes goes into an engine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.full_tests.engines import engine, generate

SCRIPT = Path(__file__).parents[2] / "calibration" / "choose_speculation.py"
ENGINE = ["--engine", json.dumps({"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True})]


def script(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options, *ENGINE, "--out", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


def check(report: dict[str, Any], methods: list[str], drafts: list[int], batches: list[int]) -> None:
    found = [(one["method"], one["num_speculative_tokens"]) for one in report["candidates"]]
    assert found == [(method, k) for method in methods for k in drafts]
    for one in report["candidates"]:
        rates = one["accepted_at"]
        assert len(rates) == one["num_speculative_tokens"]
        assert 1 >= rates[0] > 0
        assert list(rates) == sorted(rates, reverse=True)
        assert one["tokens_per_step"] == pytest.approx(1 + sum(rates))
        assert [row["batch"] for row in one["by_batch"]] == batches
        assert all(row[name] > 0 for row in one["by_batch"] for name in ("plain_ms", "verify_ms", "tokens_per_s"))
    ranges = report["num_speculative_tokens_per_batch_size"]
    assert ranges[0][0] == 1
    assert ranges[-1][1] == batches[-1]
    assert report["pays"] == (report["speculative_config"] is not None)


def serves(model: str, config: dict[str, Any], schedule: list[list[int]], batch: int) -> None:
    """An engine takes what was written, and batches of that size."""
    config = config | {"num_speculative_tokens_per_batch_size": schedule}
    with engine(model, speculative_config=config, max_num_seqs=batch) as llm:
        outputs = generate(llm, [[5, 6, 7]] * batch, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8] * batch


def test_choice_from_beginning_to_end(looping_llama: str, tmp_path: Path) -> None:
    """A drafter that is always right, for a target whose steps cost next to nothing: whether it pays is open."""
    done = script(
        tmp_path,
        *(looping_llama, "--draft", looping_llama, "--num-speculative-tokens", "2", "--batches", "2", "--turns", "1"),
        *("--output-len", "16", "--limit", "3", "--json"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "choice.json").read_text())
    check(report, ["draft_model", "ngram"], [2], [2])
    # Not all of it: near its end an answer has no room for two.
    assert report["candidates"][0]["accepted_at"][1] > 0.8
    assert "Speedup at batch size 2" in (tmp_path / "choice.html").read_text()
    drafter = {"method": "draft_model", "model": looping_llama, "num_speculative_tokens": 2}
    serves(looping_llama, drafter, [[1, 1, 2], [2, 2, 0]], 2)


@pytest.mark.slow
def test_it_goes_on_where_it_was_interrupted(looping_llama: str, cousin: str, tmp_path: Path) -> None:
    given = [looping_llama, "--draft", cousin, "--batches", "1", "3", "--turns", "1", "--output-len", "16"]
    first = script(tmp_path, *given, "--num-speculative-tokens", "1")
    assert first.returncode == 0, first.stderr
    assert first.stderr.count("kept from an earlier run") == 0
    assert "| method | k | mean acceptance length |" in first.stdout
    second = script(tmp_path, *given, "--num-speculative-tokens", "1", "3")
    assert second.returncode == 0, second.stderr
    assert second.stderr.count("kept from an earlier run") == 2
    report = json.loads((tmp_path / "choice.json").read_text())
    check(report, ["draft_model", "ngram"], [1, 3], [1, 3])
    if report["pays"]:
        serves(looping_llama, report["speculative_config"], report["num_speculative_tokens_per_batch_size"], 3)


@pytest.mark.slow
def test_estimates_for_a_card(looping_llama: str, cousin: str, tmp_path: Path) -> None:
    """Acceptance is measured, each k by itself; costs are not."""
    given = [
        looping_llama,
        "--draft",
        cousin,
        "--card",
        "gaudi3",
        "--output-len",
        "16",
        "--num-speculative-tokens",
        "1",
        "3",
    ]
    done = script(tmp_path, *given)
    assert done.returncode == 0, done.stderr
    assert "nothing was run on a Gaudi" in done.stdout
    report = json.loads((tmp_path / "choice.json").read_text())
    check(report, ["draft_model", "ngram"], [1, 3], [1, 4, 16])
    at_once = script(tmp_path, *given, "--one-run")
    assert at_once.returncode == 0, at_once.stderr
    told = json.loads((tmp_path / "choice.json").read_text())
    # The largest k is the same run; of the others it tells about as much.
    assert [one["accepted_at"] for one in told["candidates"][1::2]] == [
        one["accepted_at"] for one in report["candidates"][1::2]
    ]
    for one, other in zip(told["candidates"], report["candidates"], strict=True):
        assert one["tokens_per_step"] == pytest.approx(other["tokens_per_step"], rel=0.15)


@pytest.mark.slow
def test_what_an_engine_refuses_is_told_in_the_last_line(looping_llama: str, stranger: str, tmp_path: Path) -> None:
    done = script(tmp_path, looping_llama, "--draft", stranger, "--num-speculative-tokens", "1", "--batches", "1")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("gaudi-spec tune: error: ")
    assert "has other tokens" in last
    assert "draft_model-1.log" in last

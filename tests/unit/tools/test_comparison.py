"""A comparison without an engine: how answers are counted, turns are taken, and figures are printed."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_gaudi_spec.tools.compare import measure
from vllm_gaudi_spec.tools.compare.measure import Answer
from vllm_gaudi_spec.tools.compare.run import main


def arriving(*steps: list[int], histogram: list[int] | None = None) -> Answer:
    answer = Answer("prompt", [1], params=None)
    for header, tokens in enumerate(steps):
        last = header == len(steps) - 1 and histogram is not None
        metrics = SimpleNamespace(histogram=histogram, num_draft_tokens=2 * sum(histogram)) if last else None
        step: Any = SimpleNamespace(token_ids=tokens, spec_decode_metrics=metrics)
        assert answer.take(step, 0.5 * (header + 1)) == len(tokens)
    return answer


def test_a_steps_last_token_is_the_targets() -> None:
    answer = arriving([5], [6, 7, 8], [], [9], [10, 11], histogram=[1, 1, 1])
    assert answer.token_ids == [5, 6, 7, 8, 9, 10, 11]
    assert answer.steps() == [(1, 0), (3, 2), (1, 0), (2, 1)]


def test_latency_of_an_answer() -> None:
    """Its outputs come every half second, and one of them without a token."""
    assert arriving([5], [6, 7, 8], [], [9]).latency() == {"ttft": 0.5, "tpot": 1.5 / 4, "itl": 0.75}
    assert arriving([5, 6]).latency() == {"ttft": 0.5, "tpot": None, "itl": None}


def test_an_answer_that_its_end_cut_off() -> None:
    """Two drafts were accepted in the last step too, and the target's own token after them was not wanted."""
    answer = arriving([5], [6, 7, 8], [9, 10], histogram=[0, 0, 2, 0])
    assert answer.steps() == [(1, 0), (3, 2), (2, 2)]


def test_counts_that_contradict_each_other_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="contradicts the number of tokens"):
        arriving([5], [6, 7], histogram=[0, 0, 0, 1]).steps()
    with pytest.raises(RuntimeError, match="contradicts"):
        arriving([5], [6, 7], [8], histogram=[2, 0]).steps()


def test_lengths_of_all_answers() -> None:
    answers = [arriving([5], [6, 7], histogram=[3, 1, 0]), arriving([5]), arriving([5], [6], histogram=[1, 0, 2])]
    assert measure.count_acceptance(answers, 2) == {
        "num_drafts": 7,
        "num_draft_tokens": 14,
        "num_accepted_tokens": 5,
        "accepted_lengths": [4, 1, 2],
        "acc_counts": [3, 2],
        "acc_rate": 5 / 14,
        "mean_accepted_length": 1 + 5 / 7,
    }
    assert measure.count_acceptance([arriving([5], [6])], 0)["acc_rate"] is None


def test_a_slow_minute_of_the_machine_does_not_move_the_ratio() -> None:
    """Two prompts and three turns, the last of which found the machine four times as slow."""
    base = [[1.0, 2.0], [1.0, 2.0], [4.0, 8.0]]
    found = measure.compute_speedup(base, [[0.5, 2.0], [0.5, 2.0], [2.0, 8.0]])
    assert found == {"ratio": 1.5, "low": 1.0, "high": 2.0}
    assert measure.sum_median_seconds(base) == 3.0


def test_an_unknown_device_is_one_line_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VGS_DEVICE", "tpu")
    assert main(["--task", "ngram"], command=("gaudi-spec", "demo")) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("error: task ngram failed: VGS_DEVICE=tpu is not available; use one of cpu, ")


def test_another_platform_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vllm_gaudi_spec.platforms.base.is_active", lambda: False)
    monkeypatch.setattr("vllm_gaudi_spec.tools.compare.run.make_setup", lambda *_: pytest.fail("it went on"))
    assert main(["--task", "ngram"], command=("gaudi-spec", "demo")) == 1
    assert "another platform plugin; unset VLLM_PLUGINS" in capsys.readouterr().err

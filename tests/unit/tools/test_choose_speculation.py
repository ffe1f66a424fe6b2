"""How far to speculate: acceptance, costs, the choice between candidates, its schedule and its picture."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from tests.support.fakes import step
from tests.support.small_engine import ROOMY, SmallEngine, Variant
from vllm_gaudi_spec.records import DECODE, PREFILL, Planned, Shape
from vllm_gaudi_spec.tools import cli
from vllm_gaudi_spec.tools.tune import choice
from vllm_gaudi_spec.tools.tune import choose as choose_command
from vllm_gaudi_spec.tools.tune.acceptance import Acceptance, Counts
from vllm_gaudi_spec.tools.tune.cases import Cases
from vllm_gaudi_spec.tools.tune.child import run_module
from vllm_gaudi_spec.tools.tune.choice import Candidate, choose, ranges
from vllm_gaudi_spec.tools.tune.costs import Clock, StepCost, cost_at, cost_of, steady
from vllm_gaudi_spec.tools.tune.drafters import Drafter

SCRIPT = Path(__file__).parents[3] / "calibration" / "choose_speculation.py"


def accepting(num_drafts: int, *accepted: int, plain_steps: int = 0) -> Acceptance:
    """One request whose steps accepted so many, and some that had no drafts."""
    steps = len(accepted) + plain_steps
    return Acceptance(num_drafts, (Counts(steps + sum(accepted), steps, accepted),))


def candidate(name: str, num_drafts: int, tokens_per_step: float, **step_s: float) -> Candidate:
    """`b4=1.5`: a step with drafts of 4 rows takes 1.5 plain ones."""
    steps = 1000
    whole = round(steps * (tokens_per_step - 1))
    accepted = [whole // steps] * steps
    accepted[0] += whole % steps
    costs = tuple(StepCost(int(size[1:]), 1.0, seconds, 0.0) for size, seconds in step_s.items())
    return Candidate(name, {"method": name}, accepting(num_drafts, *accepted), costs)


# ---- acceptance ------------------------------------------------------------------------------------------


def test_acceptance_counts_steps_without_drafts() -> None:
    found = accepting(3, 3, 0, 1, plain_steps=1)
    assert found.tokens_per_step == 8 / 4
    assert found.positions == (2 / 4, 1 / 4, 1 / 4)
    assert found.drafting == 3 / 4
    assert found.tokens_per_step == 1 + sum(found.positions)


def test_a_batch_verifies_when_any_row_has_drafts() -> None:
    found = accepting(1, 1, plain_steps=1)
    assert found.verifying(1) == 0.5
    assert found.verifying(3) == 1 - 0.5**3


def test_counts_of_an_answer() -> None:
    metrics = SimpleNamespace(per_step_accepted=[3, 0])
    assert Counts.of(SimpleNamespace(token_ids=range(6), spec_decode_metrics=metrics)) == Counts(5, 2, (3, 0))
    assert Counts.of(SimpleNamespace(token_ids=range(6), spec_decode_metrics=None)) == Counts(5, 5, ())


def test_a_longer_run_estimates_fewer_drafts() -> None:
    found = accepting(3, 3, 0, 2, plain_steps=1).shortened(1)
    assert found.num_drafts == 1
    assert found.positions == (2 / 4,)
    assert found.tokens_per_step == 6 / 4
    with pytest.raises(ValueError, match="cannot show"):
        found.shortened(2)


def test_interval_narrows_with_the_number_of_requests() -> None:
    one, other = Counts(10, 5, (1,) * 5), Counts(20, 5, (3,) * 5)
    few, many = Acceptance(3, (one, other) * 2), Acceptance(3, (one, other) * 50)
    widths = [high - low for low, high in (few.interval(), many.interval())]
    assert widths[0] > 2 * widths[1] > 0
    assert few.interval()[0] < few.tokens_per_step < few.interval()[1]


# ---- costs -----------------------------------------------------------------------------------------------


def test_costs_between_measured_sizes_are_on_a_line() -> None:
    costs = (StepCost(2, 1.0, 2.0, 0.5), StepCost(6, 3.0, 4.0, 0.5))
    assert cost_at(costs, 3) == StepCost(3, 1.5, 2.5, 0.5)
    assert cost_at(costs, 1) == costs[0]
    assert cost_at(costs, 6) == cost_at(costs, 100) == costs[1]


def test_a_step_costs_what_its_kinds_cost() -> None:
    assert StepCost(1, 1.0, 3.0, 0.25).step_s(verifying=0.5) == 2.25


class _Steps:
    """Calls a clock for steps of given rows and queries, as a runner does; time is what `now` says."""

    def __init__(self, clock: Clock, now: list[float]) -> None:
        self.clock, self.now = clock, now

    def draft(self, seconds: float) -> None:
        with self.clock.drafting():
            self.now[0] += seconds

    def step(self, rows: int, queries: int, seconds: float, phase: str = DECODE) -> None:
        self.clock.step_begins()
        names = [f"r{row}" for row in range(rows)]
        planned = Planned(shape=Shape(phase, rows, queries, 64), requests=[], counts=[], finishes=[])
        self.clock.step_planned(step(dict.fromkeys(names, queries)), [planned])
        self.now[0] += seconds
        self.draft(2)
        self.draft(1)
        self.now[0] += 10  # what the engine does between two steps


def test_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """From one step's beginning to the next one's, the drafter apart, and only between steps of the same batch."""
    now = [1e6]  # since the machine was started
    monkeypatch.setattr("vllm_gaudi_spec.tools.tune.costs.time.perf_counter", lambda: now[0])
    clock = Clock()
    assert clock.take() == [], "nothing began"
    runner = _Steps(clock, now)
    for _ in range(4):
        runner.step(2, 4, seconds=5)
    for _ in range(3):
        runner.step(2, 1, seconds=1)
    runner.step(1, 4, seconds=500)
    runner.step(2, 4, seconds=500, phase=PREFILL)
    every = clock.take()
    assert every[0].seconds == 18, "the first step began when it was begun"
    assert every[-1].rows == 0, "a prompt chunk is no decode"
    steps = steady(every, 2)
    assert [(step.queries, step.seconds, step.draft) for step in steps] == [(4, 18, 3)] * 3 + [(1, 14, 3)] * 2
    assert cost_of(steps, 2) == StepCost(2, plain_s=11, verify_s=15, draft_s=3)
    # A drafter that never drafts
    assert cost_of(steps[3:], 2) == StepCost(2, plain_s=11, verify_s=11, draft_s=3)
    with pytest.raises(ValueError, match="no step decoded 2 requests at once"):
        cost_of(steps[:3], 2)


@pytest.mark.parametrize(("method", "overlap"), [("draft_model", True), ("draft_model", False), ("suffix", False)])
def test_a_runner_calls_its_observer_for_every_step_and_all_drafting(
    method: str, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that no runner reads: it is moved by the drafter's own functions, below the runner's calls of them."""
    engine = SmallEngine(Variant(method, overlap=overlap, num_blocks=ROOMY), tmp_path)
    now = [1e6]
    monkeypatch.setattr("vllm_gaudi_spec.tools.tune.costs.time.perf_counter", lambda: now[0])
    proposer: Any = engine.runner.drafting._proposer  # type: ignore[union-attr]
    propose = proposer.propose

    def slow(*args: Any) -> Any:
        now[0] += 3
        return propose(*args)

    proposer.propose = slow
    before = dict(vars(engine.runner))
    clock = engine.runner.observer = Clock()
    assert {name for name, value in vars(engine.runner).items() if value is not before[name]} == {"observer"}
    engine.add("a", [3, 4, 5], SamplingParams(temperature=0, max_tokens=24))
    engine.finish()
    steps = clock.take()
    assert len(steps) == engine.num_steps
    assert max(step.seconds for step in steps) == 3
    decodes = [step for step in steps if step.rows == 1]
    assert any(step.queries > 1 and step.draft == 3 for step in decodes)
    assert sum(step.draft for step in steps) == now[0] - 1e6, "all time of the drafter was seen"


# ---- the choice ------------------------------------------------------------------------------------------


def test_gain_is_tokens_over_time() -> None:
    one = candidate("draft_model", 3, 2.0, b1=1.25, b4=1.6)
    assert one.speedup(1) == pytest.approx(1.6)
    assert one.speedup(4) == pytest.approx(1.25)
    assert one.speedup(2) == pytest.approx(2.0 / (1.25 + 0.35 / 3))


def test_the_fastest_wins_at_each_size_and_overall() -> None:
    few = candidate("draft_model", 1, 1.5, b1=1.1, b16=1.2)
    many = candidate("draft_model", 4, 2.4, b1=1.2, b16=2.2)
    found = choose([few, many], [16, 1])
    assert found.batches == (1, 16)
    assert (found.best_at(1), found.best_at(16)) == (many, few)
    # 2.0 * 1.09 is more than 1.36 * 1.25
    assert found.chosen is many
    assert found.schedule() == [[1, 16, 4]]
    assert found.speculative_config() == {"method": "draft_model", "num_speculative_tokens": 4}


def test_drafts_are_turned_off_where_they_lose() -> None:
    """At the size where the line between two measured ones crosses."""
    one = candidate("eagle", 3, 2.0, b1=1.0, b9=3.0)
    found = choose([one], [1, 9], max_num_seqs=12)
    # A step takes 1 + (B - 1) / 4 plain ones, which is 2 at B = 5.
    assert found.schedule() == [[1, 5, 3], [6, 12, 0]]
    config = found.speculative_config()
    assert config is not None
    lookup = build_dynamic_sd_schedule_lookup(config["num_speculative_tokens_per_batch_size"], 12, 3)
    assert lookup[1:] == [3] * 5 + [0] * 7
    words = found.serve_arguments("some/model")
    assert words[:5] == ["vllm", "serve", "some/model", "--max-num-seqs", "12"]
    assert json.loads(words[-1]) == config
    assert "in batches of 6 to 12;" in choice.conclusion(found, "some/model")
    assert "in batches of 6;" in choice.conclusion(choose([one], [1, 9], max_num_seqs=6), "some/model")


def test_a_size_where_drafts_are_off_counts_as_no_loss() -> None:
    """1.5 at one size and nothing at the other is more than 1.2 at both."""
    steep = candidate("eagle", 2, 1.5, b1=1.0, b16=7.5)
    flat = candidate("draft_model", 2, 1.5, b1=1.25, b16=1.25)
    assert choose([steep, flat], [1, 16]).chosen is steep


def test_ranges_follow_each_other() -> None:
    assert ranges([2]) == [[1, 1, 2]]
    assert ranges([2, 2, 0, 0, 2]) == [[1, 2, 2], [3, 4, 0], [5, 5, 2]]


def test_when_speculation_does_not_pay() -> None:
    """Also when it is faster by less than what two measurements differ by."""
    found = choose([candidate("ngram", 2, 1.5, b1=1.49, b4=3.0)], [1, 4])
    assert found.chosen is found.best_at(1) is None
    assert found.schedule() == [[1, 4, 0]]
    assert found.serve_arguments("m") == ["vllm", "serve", "m", "--max-num-seqs", "4"]
    assert "does not pay" in choice.conclusion(found, "m")
    written = found.as_json("m")
    assert (written["pays"], written["num_speculative_tokens"], written["speculative_config"]) == (False, 0, None)
    assert [row["speedup"] for row in written["by_batch"]] == [1.0, 1.0]


def test_nothing_to_choose_from() -> None:
    with pytest.raises(ValueError, match="nothing to choose"):
        choose([], [1])


def test_tables_have_a_line_for_each() -> None:
    found = choose([candidate("ngram", 2, 1.5, b1=1.2), candidate("eagle", 3, 2.0, b1=1.2)], [1])
    lines = [line.strip("| ").split(" | ") for line in choice.tables(found).splitlines() if line]
    gains = {line[1]: line[-1] for line in lines[-3:]}
    assert gains == {"none": "1.00", "ngram": "1.25", "eagle": "1.67 best"}


# ---- cases -----------------------------------------------------------------------------------------------


def test_an_answer_is_kept_for_the_same_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(module: str, task: dict[str, object], log: Path) -> dict[str, object]:
        asked.append(task)
        counts = {"tokens": 3, "steps": 2, "accepted": [1]}
        cost = {"batch": 1, "plain_s": 1.0, "verify_s": 2.0, "draft_s": 0.5}
        return {"context": 7, "acceptance": {"2": [counts]}, "costs": [cost]}

    monkeypatch.setattr("vllm_gaudi_spec.tools.tune.cases.run_module", run)
    answered: list[int] = []
    cases = Cases(tmp_path / "kept", said := [].append, answered.append)
    first = cases.answer("eagle-2", {"model": "m"})
    assert first.acceptance == {2: Acceptance(2, (Counts(3, 2, (1,)),))}
    assert first.costs == (StepCost(1, 1.0, 2.0, 0.5),)
    assert Cases(tmp_path / "kept", said, answered.append).answer("eagle-2", {"model": "m"}) == first
    assert len(asked) == 1
    cases.answer("eagle-2", {"model": "other"})
    assert len(asked) == 2
    assert answered == [1, 1, 1]


def test_a_failure_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"its process ended with 1 \(log: .*case.log\)"):
        run_module("vllm_gaudi_spec.tools.tune.no_such_module", {}, tmp_path / "case.log")
    assert "no_such_module" in (tmp_path / "case.log").read_text()


def test_another_python_sees_the_package_alone(tmp_path: Path) -> None:
    """Not what lies beside it, nor the arguments of this process."""
    there = tmp_path / "python"
    there.write_text(
        '#!/bin/sh\ntest "$(ls $PYTHONPATH)" = vllm_gaudi_spec || exit 9\n'
        'test -e $PYTHONPATH/vllm_gaudi_spec/tools/tune/reference.py || exit 8\necho "{}" > $4\n'
    )
    there.chmod(0o755)
    assert run_module("some.module", {}, tmp_path / "log", str(there)) == {}


def question(*words: str) -> dict[str, object]:
    options = cli.make_parser().parse_args(["tune", *words])
    drafter = options.draft[0] if options.draft else Drafter.parse("ngram")
    return choose_command.task_of(drafter, 2, ["text"], options)


def test_a_question_changes_with_what_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of both models and quantisation files, but not the folder that one happens to be in."""
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    quantized = tmp_path / "quant.json"
    quantized.write_text("{}")
    target, drafter = str(tmp_path / "target"), str(tmp_path / "drafter")
    ours = json.dumps({"additional_config": {"gaudi_spec": {"draft_quant_config": str(quantized)}}})

    def ask() -> list[dict[str, object]]:
        return [
            question(target),
            question(target, "--draft", drafter),
            question(target, "--draft", drafter, "--engine", ours),
        ]

    first = ask()
    monkeypatch.chdir(tmp_path)
    assert ask() == first
    (tmp_path / "drafter" / "model.safetensors").write_bytes(b"WEIGHTS")
    second = ask()
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, False, False]
    quantized.write_text('{"mode": "QUANTIZE"}')
    third = ask()
    assert [one == other for one, other in zip(second, third, strict=True)] == [True, True, False]
    monkeypatch.setenv("QUANT_CONFIG", str(quantized))
    assert all(one != other for one, other in zip(third, ask(), strict=True))


def test_the_largest_batch_of_the_server_is_measured_too() -> None:
    options = cli.make_parser().parse_args(["tune", "m", "--batches", "4", "1", "--max-num-seqs", "64"])
    assert choose_command.sizes(options) == [1, 4, 64]
    assert question("m", "--batches", "4", "--max-num-seqs", "64")["max_num_seqs"] == 64


# ---- the command -----------------------------------------------------------------------------------------


def test_drafters_as_they_are_written() -> None:
    assert Drafter.parse("org/small").config == {"method": "draft_model", "model": "org/small"}
    assert Drafter.parse("eagle=org/head").config == {"method": "eagle", "model": "org/head"}
    assert Drafter.parse("mtp").config == {"method": "mtp"}
    lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
    assert Drafter.parse("ngram_gpu").config == {"method": "ngram_gpu", **lookup}
    for text in ("eagle", "ngram=org/small", "suffix=", "=org/small=", "custom_class"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no drafter: write METHOD=MODEL"):
            Drafter.parse(text)


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["/no/such"], 2, "no model folder /no/such"),
        (["{model}", "--draft", "eagle=/no/drafter"], 2, "no model folder /no/drafter"),
        (["{model}", "--draft", "egale=/some"], 2, "is no drafter: write METHOD=MODEL"),
        (["{model}", "--prompts", "{empty}"], 1, "no prompts"),
        (["{model}", "--num-speculative-tokens", "17"], 2, "at most 16 drafts"),
        (["{model}", "--batches", "0"], 2, "0 is not a whole number of 1 or more"),
        (["{model}", "--max-num-seqs", "2"], 2, "less than a batch of 16"),
        (["{model}", "--one-run"], 2, "are for --card"),
        (["{model}", "--speculative-config", '{{"method": "ngram"}}'], 2, "method is what this command chooses"),
        (["some/model", "--card", "gaudi2"], 1, "give its folder"),
        (["{model}", "--card", "gaudi2"], 1, "an estimate needs the model's files"),
    ],
)
def test_refusals(options: list[str], status: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    names = {"model": str(tmp_path), "empty": str(tmp_path / "empty.jsonl")}
    command = [sys.executable, str(SCRIPT), *(word.format(**names) for word in options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert words in done.stderr.splitlines()[-1]

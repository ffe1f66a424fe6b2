"""Parts of a step: they are measured on the real runner, and leave it as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.small_engine import ROOMY, SmallEngine, Variant
from vllm_gaudi_spec.runner import model_runner, report
from vllm_gaudi_spec.tools.compare.phases import ENGINE, PARTS, PHASES, Phases, StepTimes


class Watched(StepTimes):
    """As vLLM mixes it into the worker."""

    def __init__(self, runner: Any) -> None:
        self.model_runner = runner


@pytest.mark.parametrize(
    ("method", "overlap", "tokens"), [(None, False, 1), ("ngram", False, 4), ("ngram_gpu", True, 4)], ids=str
)
def test_a_decode_step(method: str | None, overlap: bool, tokens: int, tmp_path: Path) -> None:
    engine: Any = SmallEngine(Variant(method, overlap=overlap, num_blocks=ROOMY), tmp_path)
    for name in ("a", "b"):
        engine.add(name, [3, 4, 5, 3, 4, 5], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    functions, take = dict(vars(model_runner)), report.Report.get_output
    watched = Watched(engine.runner)
    watched.watch_steps()
    engine.finish()
    step = watched.watched_step()
    assert step is not None
    assert (step["requests"], step["tokens"]) == (2, tokens)
    parts = [(part["part"], part["start"], part["end"]) for part in step["parts"]]
    names = {name for name, _, _ in parts}
    assert names == {*PARTS, ENGINE} - (set() if method else {"draft"})
    assert sum(end - start for _, start, end in parts) == pytest.approx(step["seconds"]), "nothing twice, nothing lost"
    begins = {name: min(start for part, start, _ in parts if part == name) for name in names}
    assert begins["prepare"] < begins["forward"] < begins["verify"] < begins["report"]
    assert not {"execute_model", "sample_tokens", "apply", "forward", "send"} & vars(engine.runner).keys()
    assert model_runner.plan_batches is functions["plan_batches"]
    assert report.Report.get_output is take


def test_an_engine_that_did_nothing_has_no_step(tmp_path: Path) -> None:
    watched = Watched(SmallEngine(Variant("ngram"), tmp_path).runner)
    watched.watch_steps()
    assert watched.watched_step() is None


def test_what_a_function_calls_is_not_its_own() -> None:
    phases = Phases()
    inner = phases.timed(lambda: sum(range(200_000)), "draft")
    outer = phases.timed(lambda: inner(), "report")
    outer()
    outer()
    assert [segment.phase for segment in phases.segments] == ["report", "draft", "report"] * 2
    seconds = phases.take()
    assert seconds["draft"] > seconds["report"]
    assert phases.take() == {}


def test_each_phase_is_a_part() -> None:
    assert sorted(phase for phases in PARTS.values() for phase in phases) == sorted(PHASES)

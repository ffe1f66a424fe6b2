"""The phases that `python -m benchmarks host_overhead` measures on the real runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from benchmarks.shared.phases import PHASES, Phases
from tests.support.small_engine import ROOMY, SmallEngine, Variant
from vllm_gaudi_spec.runner import model_runner, report


@pytest.mark.parametrize(("method", "overlap"), [(None, False), ("ngram", False), ("ngram_gpu", True)], ids=str)
def test_phases_of_a_run_are_measured_and_the_runner_is_restored(
    method: str | None, overlap: bool, tmp_path: Path
) -> None:
    engine: Any = SmallEngine(Variant(method, overlap=overlap, num_blocks=ROOMY), tmp_path)
    engine.add("a", [3, 4, 5, 3, 4, 5], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    plan, take = model_runner.plan_batches, report.Report.get_output
    with Phases().watching(engine.runner) as phases:
        engine.finish()
        seconds = phases.take()
    assert seconds.keys() == {*PHASES} - (set() if method else {"draft"})
    assert phases.take() == {}
    assert not {"execute_model", "sample_tokens", "apply", "forward", "send"} & vars(engine.runner).keys()
    assert model_runner.plan_batches is plan
    assert report.Report.get_output is take

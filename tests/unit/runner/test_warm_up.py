"""Warm-up jobs make the signatures that they list, and `warmup_tokens` leaves out some of them."""

from pathlib import Path

import pytest
import torch
from vllm import SamplingParams

from tests.support.fakes import CapturingBackend, CompilingBackend, HostBackend
from tests.support.small_engine import HEADS, PARALLEL, RETOKENIZE, STANDARD, SmallEngine, Variant, greedy_text
from tests.support.warm_up import listed, run_jobs
from vllm_gaudi_spec.graphs import Job
from vllm_gaudi_spec.runner.warmup import jobs, manifest, should_run

METHODS = (None, "ngram", "ngram_gpu", "draft_model", PARALLEL, RETOKENIZE, STANDARD, *HEADS)
ALWAYS_RIGHT = ("draft_model", PARALLEL, STANDARD, *HEADS)
USUAL_BRANCHES = 40
"""A few of the thousands of branches of a device that does not compile. Sampling passes differ in nothing else."""


def some(found: list[Job]) -> list[Job]:
    """Return all jobs except sampling passes, and an even selection of those."""
    passes = [job for job in found if job.kind == "sampling passes"]
    return [job for job in found if job.kind != "sampling passes"] + passes[:: -(-len(passes) // USUAL_BRANCHES)]


@pytest.mark.parametrize("backend", [HostBackend, CapturingBackend, CompilingBackend])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_each_job_makes_the_signatures_that_it_lists(
    method: str | None, backend: type[HostBackend], tmp_path: Path
) -> None:
    engine = SmallEngine(Variant(method, backend=backend), tmp_path)
    runner = engine.runner
    assert runner.recorder.manifest == manifest(runner)
    with torch.inference_mode():
        run_jobs(some(list(jobs(runner))), runner.recorder)
    prompt = list(range(30, 56))
    engine.add("first", prompt, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    engine.finish()
    assert engine.texts["first"] == greedy_text(prompt, 30)
    if method in ALWAYS_RIGHT:
        assert engine.num_accepted == engine.num_verified > 20, "nothing is left of warm-up"


@pytest.mark.parametrize("method", ["draft_model", RETOKENIZE])
def test_warm_up_limit_lists_more_than_it_runs(method: str, tmp_path: Path) -> None:
    runner = SmallEngine(Variant(method), tmp_path).runner
    found = list(jobs(runner))
    assert all(should_run(job, -1) for job in found)
    ran = [job for job in found if should_run(job, 4)]
    assert all(job.num_tokens <= 4 and job.is_common for job in ran)
    assert {job.kind for job in ran} >= {"states", "decodes", "sampling passes"}
    assert set(listed(ran)) < set(listed(found)) == manifest(runner)

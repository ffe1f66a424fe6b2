"""Which warm-up jobs the profile run measures, and how it uses their peaks. The emulated Gaudi measures real ones."""

from pathlib import Path

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from tests.support.fakes import CompilingBackend
from tests.support.small_engine import _SPEC, MAX_ROWS, RETOKENIZE, ROOMY, STANDARD, SmallEngine, Variant
from vllm_gaudi_spec.graphs import Job
from vllm_gaudi_spec.runner import profile
from vllm_gaudi_spec.runner.warmup import jobs


def job(kind: str, name: str, num_tokens: int) -> Job:
    return Job(kind, lambda: name, (name,), num_tokens)


def test_profile_runs_longest_context_and_most_branches_of_each_kind() -> None:
    found = [
        Job("states", str),
        job("decodes", "4 rows, long", 4),
        job("prompt chunks", "only", 9),
        job("decodes", "4 rows, short", 4),
        job("decodes", "4 rows, shortest", 4),
        job("decodes", "2 rows", 2),
    ]
    assert [one.run() for one in profile._largest(iter(found))] == ["4 rows, long", "4 rows, shortest", "only", "only"]


@pytest.mark.parametrize("method", ["draft_model", STANDARD, RETOKENIZE, "ngram_gpu"])
def test_device_drafter_is_profiled(method: str, tmp_path: Path) -> None:
    """So are the distributions that a rule gathers in the largest sampling pass."""
    engine = SmallEngine(Variant(method, num_blocks=ROOMY, backend=CompilingBackend), tmp_path)
    runner, gathered = engine.runner, list[int]()
    layers = runner.target.layer_names
    if method in ("draft_model", STANDARD):
        layers = layers + runner.drafter.layer_names
    with torch.inference_mode():
        runner.initialize_kv_cache(KVCacheConfig(2, [], [KVCacheGroupSpec(layers, _SPEC)]), profiled_blocks=ROOMY)
        probs = runner.drafting.gather_probs
        runner.drafting.gather_probs = lambda rows_B, num_drafts: (
            gathered.append(len(rows_B)),
            probs(rows_B, num_drafts),
        )[1]
        found = list(profile._largest(jobs(runner)))
        for one in found:
            one.run()
    kinds = {one.kind for one in found}
    assert kinds >= {"rounds of drafts", "sampling passes"}
    assert ("drafter's reads" in kinds) == (method != "ngram_gpu")
    assert (max(gathered, default=0) == MAX_ROWS) == (method == STANDARD)

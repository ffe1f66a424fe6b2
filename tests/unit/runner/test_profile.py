"""Which warm-up jobs the profile run measures, and how it uses their peaks. The emulated Gaudi measures real ones."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from tests.support.fakes import CompilingBackend
from tests.support.small_engine import _SPEC, MAX_ROWS, RETOKENIZE, ROOMY, STANDARD, SmallEngine, Variant
from tests.unit.runner.test_memory import GIB, config
from vllm_gaudi_spec.config import UnsupportedConfigError
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


def test_profile_returns_the_largest_peak_and_restores_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the option to lower if no memory is left for KV."""

    def peaks(runner: Any, *configs: object) -> dict[str, int]:
        runner.kv_cache, runner.backend = configs, None
        return {"decodes": 2 * GIB, "prompt chunks": 3 * GIB}

    monkeypatch.setattr(profile, "_peaks", peaks)
    monkeypatch.setattr(profile, "_kv_cache_configs", lambda runner, budget: ("few", budget))
    vllm_config = config(max_num_batched_tokens=8192)
    vllm_config.compilation_config = SimpleNamespace(static_forward_context={})
    backend = SimpleNamespace(memory=SimpleNamespace(measures_peak=True))
    runner: Any = SimpleNamespace(backend=backend, vllm_config=vllm_config)
    before = dict(vars(runner))
    assert profile.peak_bytes(runner, 4 * GIB) == 3 * GIB
    assert vars(runner) == before
    with pytest.raises(UnsupportedConfigError, match=r"but only 3.00 GiB .*; lower --max-num-batched-tokens 8192 -> 4"):
        profile.peak_bytes(runner, 3 * GIB)


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
    assert "sampling passes" in kinds
    has_model = method != "ngram_gpu"
    assert ({"rounds of drafts", "drafter's reads"} <= kinds) == has_model
    assert (min(runner.drafting.pass_drafts) > 0) != has_model
    assert (max(gathered, default=0) == MAX_ROWS) == (method == STANDARD)

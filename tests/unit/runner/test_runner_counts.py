"""What a runner counts and reports about its rows, driven by vLLM's scheduler."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.fakes import CapturingBackend, CompilingBackend, HostBackend
from tests.support.small_engine import ROOMY, SmallEngine, Variant
from vllm_gaudi_spec.metrics import COMPILED


@pytest.mark.parametrize(("method", "overlap"), [("ngram", False), ("ngram_gpu", True)])
def test_last_empty_step_reports_compiled_graphs(method: str, overlap: bool, tmp_path: Path) -> None:
    engine: Any = SmallEngine(Variant(method, overlap=overlap), tmp_path)
    engine.add("a", [3, 4, 5], SamplingParams(temperature=0, max_tokens=10))
    for _ in range(2):
        engine.step()
    engine.runner.backend.graphs.compiled_after_warmup = lambda: 3
    engine.finish()
    assert engine.num_steps < 16, "it was not asked for another reason"
    assert engine.scheduler.step_metrics._reported[COMPILED, ""] == 3


@pytest.mark.parametrize("backend", [CapturingBackend, CompilingBackend])
@pytest.mark.parametrize("wants", [dict(logprobs=3), dict(logprob_token_ids=[5, 6])], ids=["likeliest", "named"])
def test_unrequested_logprobs_are_not_downloaded(
    backend: type[HostBackend], wants: dict[str, Any], tmp_path: Path
) -> None:
    """A full branch computes them for a penalty or a grammar. Only steps with requests that ask for them copy them."""
    engine: Any = SmallEngine(Variant("ngram", num_blocks=ROOMY, backend=backend), tmp_path)
    memory = engine.runner.backend.memory
    download, sizes = memory.download, list[int]()
    memory.download = lambda tensor: sizes.append(tensor.numel()) or download(tensor)

    def largest(**params: Any) -> int:
        sizes.clear()
        engine.add(str(params), [3, 4, 5], SamplingParams(temperature=0, max_tokens=4, **params))
        while engine.running:
            engine.step()
        return max(sizes)

    plain = largest()
    assert largest(presence_penalty=1.0) == plain
    assert largest(logit_bias={7: 1.0}) == plain
    assert largest(presence_penalty=1.0, **wants) > 5 * plain
    engine.finish()  # fails at a report that no list has

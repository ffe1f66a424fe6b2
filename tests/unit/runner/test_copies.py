"""How often a decode step copies to the device and waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams

from tests.support.fakes import CompilingBackend, CopyingMemory, HostBackend
from tests.support.small_engine import RETOKENIZE, STANDARD, SmallEngine, Variant

METHODS = (None, "custom_class", "suffix", "ngram", "ngram_gpu", "draft_model", STANDARD, RETOKENIZE)
OVERLAPPING = (None, "ngram_gpu", "draft_model", STANDARD)
EVERYTHING: dict[str, Any] = dict(
    temperature=0.8,
    seed=1,
    top_k=5,
    top_p=0.9,
    min_p=0.1,
    presence_penalty=0.5,
    logit_bias={3: 1.0},
    allowed_token_ids=list(range(40)),
    min_tokens=20,
    stop_token_ids=[7],
    logprobs=3,
)


@pytest.mark.parametrize(
    ("backend", "params"), [(HostBackend, {"temperature": 0.0}), (CompilingBackend, EVERYTHING)], ids=["greedy", "all"]
)
@pytest.mark.parametrize(
    ("method", "overlap"), [*((method, False) for method in METHODS), *((method, True) for method in OVERLAPPING)]
)
def test_decode_step_copies_at_most_twice_and_waits_once(
    method: str | None,
    overlap: bool,
    params: dict[str, Any],
    backend: type[HostBackend],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Text drafting copies once more, because it drafts after the host has read the step."""
    copies: list[torch.Size] = []

    def upload(memory: CopyingMemory, host: torch.Tensor) -> torch.Tensor:
        copies.append(host.shape)
        return host.clone()

    # Before the engine is made: some of its parts keep the method.
    monkeypatch.setattr(CopyingMemory, "upload", upload)
    engine = SmallEngine(Variant(method, overlap=overlap, backend=backend, num_blocks=200), tmp_path)
    memory = engine.runner.backend.memory
    for name, prompt in {"a": [1, 2, 3], "b": [4, 5, 4, 5, 4], "c": [6]}.items():
        engine.add(name, prompt, SamplingParams(max_tokens=50, ignore_eos=True, **params))
    for _ in range(5):  # prompts, and what drafters catch up with
        engine.step()
    for _ in range(4):
        copies.clear()
        syncs, steps = memory.num_host_syncs, engine.num_steps
        engine.step()
        assert engine.num_steps == steps + 1
        assert memory.num_host_syncs == syncs + 1
        assert len(copies) <= (3 if method == RETOKENIZE else 2), copies
    assert len(engine.running) == 3
    engine.finish()

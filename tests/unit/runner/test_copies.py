"""How often a decode step copies to the device and waits for it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams

from tests.support.fakes import CompilingBackend, CopyingMemory, HostBackend
from tests.support.media import CONFIG
from tests.support.small_engine import BLOCK_DRAFTER, PARALLEL, RETOKENIZE, STANDARD, SmallEngine, Variant
from tests.unit.runner.test_media_store import Model, Padding
from vllm_gaudi_spec.runner.extensions.media_store import MediaStore
from vllm_gaudi_spec.runner.extensions.multimodal import Multimodal

OVERLAPPING = (None, "ngram_gpu", "draft_model", PARALLEL, STANDARD, BLOCK_DRAFTER)
METHODS = (*OVERLAPPING, "custom_class", "suffix", "ngram", RETOKENIZE)
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


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of host-to-device copies. Request it before the engine is made: some parts keep the method."""
    found: list[torch.Size] = []

    def upload(memory: CopyingMemory, host: torch.Tensor) -> torch.Tensor:
        found.append(host.shape)
        return host.clone()

    monkeypatch.setattr(CopyingMemory, "upload", upload)
    return found


def check_decode_steps(engine: SmallEngine, copies: list[torch.Size], params: dict[str, Any], max_copies: int) -> None:
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
        assert len(copies) <= max_copies, copies
    assert len(engine.running) == 3
    engine.finish()


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
    copies: list[torch.Size],
) -> None:
    """Text drafting copies once more, because it drafts after the host has read the step."""
    engine = SmallEngine(Variant(method, overlap=overlap, backend=backend, num_blocks=200), tmp_path)
    check_decode_steps(engine, copies, params, max_copies=3 if method == RETOKENIZE else 2)


def test_decode_step_with_mrope_copies_at_most_twice(tmp_path: Path, copies: list[torch.Size]) -> None:
    """Where steps are captured, each decode adds rotary offsets, whether or not its prompts have images."""
    engine = SmallEngine(Variant(None, backend=CompilingBackend, num_blocks=200), tmp_path)
    runner = engine.runner
    store = MediaStore(Padding(), runner.backend, runner.recorder)
    multimodal = Multimodal(CONFIG, Model(), runner.backend, runner.max_rows, store)
    runner.extensions.append(multimodal)
    runner.target.rotary_offsets_R = multimodal.rotary_offsets.table_RX
    check_decode_steps(engine, copies, {"temperature": 0.0}, max_copies=2)

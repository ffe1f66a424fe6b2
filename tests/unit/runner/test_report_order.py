"""When a step sends tokens and drafts to the host, as recorded by a device."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.support.fakes import CapturingBackend, CompilingBackend, HostBackend
from tests.support.small_engine import NUM_DRAFTS, ROOMY, SmallEngine, Variant, greedy_text

PROMPT, NUM_TOKENS = [3, 4, 5], 24
COPY, DRAFT = "copy", "draft"


def engine_of(backend: type[HostBackend], folder: Path, *, overlap: bool) -> Any:
    engine: Any = SmallEngine(Variant("draft_model", overlap=overlap, num_blocks=ROOMY, backend=backend), folder)
    events: list[str] = []
    memory, proposer = engine.runner.backend.memory, engine.runner.drafting._proposer
    download, propose = memory.download, proposer.propose  # copies are made when they are started
    memory.download = lambda tensor: events.append(COPY) or download(tensor)
    proposer.propose = lambda request: events.append(DRAFT) or propose(request)
    memory.events = events
    engine.add("a", PROMPT, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
    return engine


def drafted_in(events: list[str]) -> list[tuple[str, str]]:
    """Return, for each step that drafted, what it did first and second. A step copies once, and drafts at most once."""
    first = events[0]
    steps = [place for place, event in enumerate(events) if event == first]
    parts = [events[begin:end] for begin, end in zip(steps, [*steps[1:], len(events)], strict=True)]
    return [(part[0], part[1]) for part in parts if len(part) == 2]


# One runs what it is asked, the others overwrite what a graph returned when it runs again.
EVERY_KIND = pytest.mark.parametrize("backend", [HostBackend, CapturingBackend, CompilingBackend])


@EVERY_KIND
def test_async_scheduling_sends_tokens_before_drafting(backend: type[HostBackend], tmp_path: Path) -> None:
    engine = engine_of(backend, tmp_path, overlap=True)
    engine.finish()
    events = engine.runner.backend.memory.events
    assert engine.texts["a"] == greedy_text(PROMPT, NUM_TOKENS)
    assert events[0] == COPY
    assert drafted_in(events).count((COPY, DRAFT)) == events.count(DRAFT) > 2
    assert events.count(COPY) == engine.runner.recorder.num_steps, "one device-to-host sync a step"
    assert engine.num_accepted > 0, "drafts that never traveled were verified"
    assert engine.runner.take_draft_token_ids() is None, "they stay on the device"


@torch.inference_mode()
def test_step_whose_forward_failed_has_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks for the tokens before it has seen the error if several steps are in flight."""
    engine = engine_of(HostBackend, tmp_path, overlap=True)
    monkeypatch.setattr(engine.runner, "compute", Mock(side_effect=RuntimeError("a card failed")))
    scheduled = engine.scheduler.schedule()
    with pytest.raises(RuntimeError, match="a card failed"):
        engine.runner.execute_model(scheduled)
    assert engine.runner.sample_tokens(None) is None


@EVERY_KIND
def test_grammar_requests_get_drafts_with_tokens(backend: type[HostBackend], tmp_path: Path) -> None:
    """Only steps with such a request send both: here one of two requests has a grammar."""
    engine = engine_of(backend, tmp_path, overlap=True)
    for _ in range(4):
        engine.step()
    events = engine.runner.backend.memory.events
    events.clear()
    engine.step()
    assert events == [COPY, DRAFT]
    engine.runner.requests.by_id["a"].params.structured_outputs = StructuredOutputsParams(regex="a*")
    events.clear()
    engine.step()
    assert events == [DRAFT, COPY]
    engine.runner.report.get_output()
    drafts = engine.runner.take_draft_token_ids()
    assert drafts.req_ids == ["a"]
    row = engine.runner.requests.by_id["a"].row
    length = int(engine.runner.requests.computed_R[row]) + 1
    (tokens,) = drafts.draft_token_ids
    assert 0 < len(tokens) <= NUM_DRAFTS
    assert tokens == engine.runner.requests.history_RM[row, length : length + len(tokens)].tolist()

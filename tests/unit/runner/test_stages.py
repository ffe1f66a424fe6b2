"""Tests of the data that pipeline stages exchange. test_random_schedules.py runs two stages together."""

from pathlib import Path

import pytest
import torch
from vllm.sequence import IntermediateTensors

from tests.support.small_engine import ROOMY, SmallEngine, Variant, greedy_text
from tests.unit.runner.test_random_schedules import asked
from vllm_gaudi_spec.model import LoadedModel, join_stage_tensors
from vllm_gaudi_spec.runner.stages import EarlyStage


def test_tensors_between_stages_are_joined_and_split() -> None:
    model = LoadedModel.__new__(LoadedModel)
    model.stage_sizes = {"hidden_states": 4, "residual": 3}
    sent = {"residual": torch.rand(5, 3), "hidden_states": torch.rand(5, 4)}
    joined_TW = join_stage_tensors(IntermediateTensors(dict(sent)))
    assert joined_TW.shape == (5, 7)
    received = model._split_stage_tensors(joined_TW).tensors
    assert received.keys() == sent.keys()
    for name, part_TH in received.items():
        assert torch.equal(part_TH, sent[name])
        part_TH.zero_()  # as a layer does that adds to it in place
    assert torch.equal(joined_TW, join_stage_tensors(IntermediateTensors(dict(sent))))


def test_output_of_the_only_stage_is_not_changed() -> None:
    states_TH, layers = torch.rand(2, 3), [torch.rand(2, 3)]
    assert join_stage_tensors(states_TH) is states_TH
    assert join_stage_tensors((states_TH, layers)) == (states_TH, layers)


def test_failed_early_stage_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, the next stage would take the next step's hidden states for those of the failed step."""
    engine = SmallEngine(Variant(staged=True, num_blocks=ROOMY), tmp_path)
    engine.add("a", *asked(0))
    monkeypatch.setattr(EarlyStage, "compute", lambda stage, batch: 1 / 0)
    with pytest.raises(SystemExit):
        engine.step()


def test_stages_work_on_different_requests_at_the_same_time(tmp_path: Path) -> None:
    """The first request's step is in flight while the second one's is scheduled. Neither is scheduled twice."""
    engine = SmallEngine(Variant("draft_model", staged=True, num_blocks=ROOMY), tmp_path)
    prompts = [asked(place)[0] for place in (0, 10)]
    params = asked(0)[1].clone()
    params.max_tokens = 12
    most = 0
    for name, prompt in zip("ab", prompts, strict=True):
        engine.add(name, prompt, params)
        engine.step()
    while engine.running:
        engine.step()
        names = [name for scheduled, *_ in engine._in_flight for name in scheduled.num_scheduled_tokens]
        assert len(set(names)) == len(names)
        most = max(most, len(names))
    assert most == 2
    for name, prompt in zip("ab", prompts, strict=True):
        assert engine.texts[name] == greedy_text(prompt, 12)
    assert engine.num_accepted > 0

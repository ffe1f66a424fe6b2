"""Adaptive verification in vLLM's schedulers, with a scripted worker."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request

from tests.support.schedulers import NUM_DRAFTS, PROMPT, Chooses, scheduler_of
from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.scheduling.scheduler import SpecAsyncScheduler, SpecScheduler

Kind = type[SpecScheduler | SpecAsyncScheduler]
KINDS = [SpecScheduler, SpecAsyncScheduler]


def adaptive(kind: Kind, folder: Path, chosen: int | None = None) -> Any:
    """Return a scheduler with requests `a` and `b`, which chooses `chosen` drafts if given."""
    upstream.apply()
    scheduler: Any = scheduler_of(kind, folder, speculative=dict(enable_adaptive_verification=True))
    for name in "ab":
        scheduler.add_request(Request(name, PROMPT, SamplingParams(max_tokens=200), None))
    if chosen is not None:
        scheduler._step_times = Chooses(chosen)
    return scheduler


@pytest.mark.parametrize("num_drafts", [0, 1, NUM_DRAFTS])
@pytest.mark.parametrize("kind", KINDS)
def test_next_step_has_as_many_positions_as_were_chosen(kind: Kind, num_drafts: int, tmp_path: Path) -> None:
    scheduler = adaptive(kind, tmp_path, num_drafts)
    first = scheduler.schedule()
    assert first.num_spec_tokens_to_schedule == num_drafts
    if issubclass(kind, AsyncScheduler):
        positions = scheduler.schedule().scheduled_spec_decode_tokens
        assert [len(positions.get(name, ())) for name in "ab"] == [num_drafts] * 2


@pytest.mark.parametrize(("accepted", "chosen"), [(NUM_DRAFTS, NUM_DRAFTS), (0, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_acceptance_changes_the_choice(kind: Kind, accepted: int, chosen: int, tmp_path: Path) -> None:
    scheduler = adaptive(kind, tmp_path)
    for num_drafts, seconds in ((0, 1.0), (1, 1.5), (NUM_DRAFTS, 2.5)):
        scheduler._step_times._at(2).seconds[num_drafts] = seconds
    scheduler._step_times._at(2).wait = 1000
    for _ in range(200):
        for name in "ab":
            scheduler._acceptance.observe(name, NUM_DRAFTS, accepted)
    assert scheduler.schedule().num_spec_tokens_to_schedule == chosen

"""What vLLM's schedulers do with our word, on a scripted worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.support.schedulers import NUM_DRAFTS, PROMPT, Never, answer, scheduler_of
from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.metrics import SKIPPED_STEPS
from vllm_gaudi_spec.scheduling.scheduler import SpecAsyncScheduler, SpecScheduler

Kind = type[SpecScheduler | SpecAsyncScheduler]


def paced(kind: Kind, folder: Path, **options: bool) -> Any:
    """With requests `a` and `b`, whose prompts are computed."""
    upstream.apply()
    scheduler: Any = scheduler_of(kind, folder, additional_config={"gaudi_spec": options})
    for name in "ab":
        scheduler.add_request(Request(name, PROMPT, SamplingParams(max_tokens=200), None))
    return scheduler


def test_no_positions_are_scheduled_for_drafts_when_drafting_is_slower(tmp_path: Path) -> None:
    scheduler = paced(SpecAsyncScheduler, tmp_path, goodput=True)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first.num_spec_tokens_to_schedule == NUM_DRAFTS
    assert {len(positions) for positions in second.scheduled_spec_decode_tokens.values()} == {NUM_DRAFTS}
    scheduler._goodput = Never()
    third, fourth = scheduler.schedule(), scheduler.schedule()
    assert third.num_spec_tokens_to_schedule == fourth.num_spec_tokens_to_schedule == 0
    assert not fourth.scheduled_spec_decode_tokens, "but after the step in which it was decided"
    stats_of_steps = [
        scheduler.update_from_output(step, answer({"a": [1], "b": [4]}, num_real))[0].scheduler_stats
        for step, num_real in ((first, {}), (second, {"a": 2, "b": 2}), (third, {}))
    ]
    counts = [stats.spec_decoding_stats for stats in stats_of_steps if stats.spec_decoding_stats is not None]
    assert sum(count.num_draft_tokens for count in counts) == 4
    assert sum(stats.gaudi_spec.get(SKIPPED_STEPS, {"": 0})[""] for stats in stats_of_steps) == 2


class Notes:
    """A rule that records its arguments."""

    def __init__(self) -> None:
        self.observed: list[int] = []

    def should_draft(self, num_rows: int, *, may_try: bool) -> bool:
        return True

    def observe(self, num_rows: int, *args: object, **kwargs: object) -> bool:
        self.observed.append(num_rows)
        return False


def test_only_consecutive_decode_steps_are_timed(tmp_path: Path) -> None:
    scheduler = paced(SpecScheduler, tmp_path, goodput=True)
    scheduler._goodput = notes = Notes()

    def step() -> None:
        scheduled = scheduler.schedule()
        scheduler.update_from_output(scheduled, answer({name: [1] for name in scheduled.num_scheduled_tokens}, {}))

    step()
    assert not notes.observed, "of prompts"
    step()
    assert not notes.observed, "after prompts"
    step()
    assert notes.observed == [2]
    # One that nobody paced: the time since the last that was is not the next one's.
    scheduler.num_spec_tokens, kept = 0, scheduler.num_spec_tokens
    step()
    scheduler.num_spec_tokens = kept
    step()
    assert notes.observed == [2]
    step()
    assert notes.observed == [2, 2]


def test_skip_reason_survives_pickling(tmp_path: Path) -> None:
    scheduler = paced(SpecScheduler, tmp_path, goodput=True)
    scheduler._goodput = Never()
    outputs = scheduler.update_from_output(scheduler.schedule(), answer({"a": [9], "b": [9]}, {}))
    sent = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs[0]))
    assert sent.scheduler_stats.gaudi_spec[SKIPPED_STEPS] == {"": 1}


@pytest.mark.parametrize("kind", [SpecScheduler, SpecAsyncScheduler])
def test_adaptive_k_limits_each_request(kind: Kind, tmp_path: Path) -> None:
    scheduler = paced(kind, tmp_path, adaptive=True)
    for _ in range(50):
        scheduler._lengths.observe("a", NUM_DRAFTS, NUM_DRAFTS)
        scheduler._lengths.observe("b", NUM_DRAFTS, 0)
    first = scheduler.schedule()
    few = first.max_drafts_by_id["b"]
    assert first.max_drafts_by_id["a"] == NUM_DRAFTS > few
    if issubclass(kind, AsyncScheduler):
        positions = scheduler.schedule().scheduled_spec_decode_tokens
        assert {name: len(positions.get(name, ())) for name in "ab"} == {"a": NUM_DRAFTS, "b": few}


@pytest.mark.parametrize("kind", [SpecScheduler, SpecAsyncScheduler])
def test_acceptance_of_finished_requests_is_forgotten(kind: Kind, tmp_path: Path) -> None:
    scheduler = paced(kind, tmp_path, adaptive=True)
    scheduler.update_from_output(scheduler.schedule(), answer({"a": [9], "b": [9]}, {"a": 3}))
    assert set(scheduler._lengths._by_id) == {"a"}
    in_flight = scheduler.schedule()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scheduler.schedule()
    assert not scheduler._lengths._by_id
    scheduler.update_from_output(in_flight, answer({"a": [9], "b": [9]}, {"a": 3, "b": 0}))
    assert not scheduler._lengths._by_id


def sizes(scheduler: Any) -> dict[str, int]:
    """Of all that a scheduler keeps."""
    return {name: len(value) for name, value in vars(scheduler).items() if isinstance(value, dict | list | set)}


def test_lost_output_leaves_no_state(tmp_path: Path) -> None:
    """Nor is its pace taken for that of a later one."""
    scheduler = paced(SpecAsyncScheduler, tmp_path, goodput=True)
    scheduler._goodput = notes = Notes()
    lost = scheduler.schedule()
    before = sizes(scheduler)
    for _ in range(5):
        lost = scheduler.schedule()
        assert lost.pace is not None
    assert sizes(scheduler) == before
    scheduler.num_spec_tokens = 0
    for _ in range(2):
        later = scheduler.schedule()
        assert later.pace is None
        scheduler.update_from_output(later, answer({"a": [1], "b": [4]}, {}))
    assert not notes.observed

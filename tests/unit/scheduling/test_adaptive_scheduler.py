"""Adaptive verification in vLLM's schedulers, with a scripted worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.support.schedulers import NUM_DRAFTS, PROMPT, Chooses, answer, scheduler_of
from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.metrics import SKIPPED_STEPS
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


def test_skipped_steps_and_verified_drafts_are_counted(tmp_path: Path) -> None:
    scheduler = adaptive(SpecAsyncScheduler, tmp_path, NUM_DRAFTS)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler._step_times = Chooses(0)
    third = scheduler.schedule()
    stats_of_steps = [
        scheduler.update_from_output(step, answer({"a": [1], "b": [4]}, num_real))[0].scheduler_stats
        for step, num_real in ((first, {}), (second, {"a": 2, "b": 2}), (third, {}))
    ]
    counts = [stats.spec_decoding_stats for stats in stats_of_steps if stats.spec_decoding_stats is not None]
    assert sum(count.num_draft_tokens for count in counts) == 4
    assert sum(stats.gaudi_spec.get(SKIPPED_STEPS, {"": 0})[""] for stats in stats_of_steps) == 1


def test_only_consecutive_decode_steps_are_timed(tmp_path: Path) -> None:
    scheduler = adaptive(SpecScheduler, tmp_path, NUM_DRAFTS)
    observed = scheduler._step_times.observed

    def step() -> None:
        scheduled = scheduler.schedule()
        scheduler.update_from_output(scheduled, answer({name: [1] for name in scheduled.num_scheduled_tokens}, {}))

    step()
    assert not observed, "a step with prompts"
    step()
    assert not observed, "a step after prompts"
    step()
    assert observed == [2]
    # A step in which nothing was chosen: the time since the last choice is not the next step's.
    scheduler.num_spec_tokens, kept = 0, scheduler.num_spec_tokens
    step()
    scheduler.num_spec_tokens = kept
    step()
    assert observed == [2]
    step()
    assert observed == [2, 2]


def test_skipped_steps_survive_pickling(tmp_path: Path) -> None:
    scheduler = adaptive(SpecScheduler, tmp_path, 0)
    outputs = scheduler.update_from_output(scheduler.schedule(), answer({"a": [9], "b": [9]}, {}))
    sent = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs[0]))
    assert sent.scheduler_stats.gaudi_spec[SKIPPED_STEPS] == {"": 1}


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


def test_schedule_by_batch_size_limits_the_choice(tmp_path: Path) -> None:
    upstream.apply()
    schedule = [[1, 1, NUM_DRAFTS], [2, 64, 1]]
    options = dict(enable_adaptive_verification=True, num_speculative_tokens_per_batch_size=schedule)
    scheduler: Any = scheduler_of(SpecScheduler, tmp_path, speculative=options, enable_prefix_caching=False)
    for name in "ab":
        scheduler.add_request(Request(name, PROMPT, SamplingParams(max_tokens=200), None))
    chosen = set()
    for _ in range(60):
        scheduled = scheduler.schedule()
        chosen.add(scheduled.num_spec_tokens_to_schedule)
        scheduler.update_from_output(scheduled, answer({"a": [1], "b": [4]}, {}))
    assert chosen == {0, 1}, "both are tried"
    assert set(scheduler._step_times._at(2).seconds) == {0, 1}


@pytest.mark.parametrize("kind", KINDS)
def test_request_without_drafts_does_not_count_as_accepting(kind: Kind, tmp_path: Path) -> None:
    scheduler = adaptive(kind, tmp_path)
    no_drafts = SamplingParams(max_tokens=200, extra_args={"num_speculative_tokens": 0})
    scheduler.add_request(Request("c", PROMPT, no_drafts, None))
    seen: list[dict[str, int]] = []
    expect = scheduler._acceptance.expect_tokens
    scheduler._acceptance.expect_tokens = lambda max_drafts: (seen.append(max_drafts), expect(max_drafts))[1]
    scheduler.schedule()
    assert seen == [{"a": NUM_DRAFTS, "b": NUM_DRAFTS, "c": 0}]


@pytest.mark.parametrize("kind", KINDS)
def test_acceptance_of_finished_requests_is_forgotten(kind: Kind, tmp_path: Path) -> None:
    scheduler = adaptive(kind, tmp_path, NUM_DRAFTS)
    scheduler.update_from_output(scheduler.schedule(), answer({"a": [9], "b": [9]}, {}))
    scheduler.update_from_output(scheduler.schedule(), answer({"a": [9], "b": [9]}, {"a": 3}))
    assert set(scheduler._acceptance._by_id) == {"a"}
    in_flight = scheduler.schedule()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scheduler.schedule()
    assert not scheduler._acceptance._by_id
    scheduler.update_from_output(in_flight, answer({"a": [9], "b": [9]}, {"a": 3, "b": 0}))
    assert "a" not in scheduler._acceptance._by_id


def sizes(scheduler: Any) -> dict[str, int]:
    """Return the size of each collection that a scheduler and its estimates of acceptance keep."""
    kept = vars(scheduler) | vars(scheduler._acceptance)
    return {name: len(value) for name, value in kept.items() if isinstance(value, dict | list | set)}


def test_lost_output_leaves_no_state(tmp_path: Path) -> None:
    scheduler = adaptive(SpecAsyncScheduler, tmp_path, NUM_DRAFTS)
    lost = scheduler.schedule()
    before = sizes(scheduler)
    for _ in range(5):
        lost = scheduler.schedule()
        assert lost.adaptive_step is not None
    assert sizes(scheduler) == before
    scheduler.num_spec_tokens = 0
    for _ in range(2):
        later = scheduler.schedule()
        assert later.adaptive_step is None
        scheduler.update_from_output(later, answer({"a": [1], "b": [4]}, {}))
    assert not scheduler._step_times.observed

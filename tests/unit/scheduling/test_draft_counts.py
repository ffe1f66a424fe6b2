"""Rows that decode are counted by their drafts, and those without by the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from tests.support.schedulers import NUM_DRAFTS, PROMPT, Chooses, answer, scheduler_of
from tests.unit.test_config import engine_config
from vllm_gaudi_spec import metrics, upstream
from vllm_gaudi_spec.config import Speculation
from vllm_gaudi_spec.metrics import (
    COMPILED,
    COVERAGE,
    HOST_SYNCS,
    PREFILL_TOKENS,
    ROWS,
    ROWS_BY_CHOICE,
    ROWS_WITHOUT_DRAFTS,
    STEPS,
)
from vllm_gaudi_spec.records import DraftRound, NoDraftReason, WorkerCounts
from vllm_gaudi_spec.scheduling.counts import DraftCounts
from vllm_gaudi_spec.scheduling.scheduler import SpecAsyncScheduler, SpecScheduler

Kind = type[SpecScheduler | SpecAsyncScheduler]
KINDS = [SpecScheduler, SpecAsyncScheduler]
ADAPTIVE = dict(enable_adaptive_verification=True)


class Play:
    """A scheduler with a scripted worker: steps of one token a request, and what was counted of them."""

    def __init__(self, kind: Kind, folder: Path, **options: Any) -> None:
        upstream.apply()
        self.scheduler: Any = scheduler_of(kind, folder, **options)
        self.counted: metrics.Figures = {}

    def admit(self, name: str, **params: Any) -> None:
        given = dict(max_tokens=200) | params
        self.scheduler.add_request(Request(name, PROMPT, SamplingParams(**given), None))

    def step(self, num_real: dict[str, int] | None = None, **more: Any) -> dict[str, float]:
        """Returns the reasons that it added. `more`: what the worker reports besides."""
        return self.on_drafter_status(*self.send(num_real, **more))

    def send(self, num_real: dict[str, int] | None = None, **more: Any) -> tuple[Any, Any]:
        """Schedules a step; returns it with the worker's output."""
        scheduled = self.scheduler.schedule()
        names = [*scheduled.num_scheduled_tokens]
        started = (
            *(new.req_id for new in scheduled.scheduled_new_reqs),
            *scheduled.scheduled_cached_reqs.resumed_req_ids,
        )
        worker_output: Any = answer({name: [9] for name in names}, dict.fromkeys(names, 0) | (num_real or {}))
        vars(worker_output).update(dict(started=started) | more)
        return scheduled, worker_output

    def on_drafter_status(self, scheduled: Any, worker_output: Any) -> dict[str, float]:
        for outputs in self.scheduler.update_from_output(scheduled, worker_output).values():
            if (stats := outputs.scheduler_stats) is None:
                continue
            for name, figures in stats.gaudi_spec.items():
                for value, number in figures.items():
                    mine = self.counted.setdefault(name, {})
                    mine[value] = mine.get(value, 0) + number
            reasons: dict[str, float] = stats.gaudi_spec.get(ROWS_WITHOUT_DRAFTS, {})
            return reasons
        return {}

    def check(self) -> None:
        """The sums that the page promises."""
        rows, by_choice = (self.counted.get(name, {}) for name in (ROWS, ROWS_BY_CHOICE))
        reasons = self.counted.get(ROWS_WITHOUT_DRAFTS, {})
        assert set(reasons) <= set(NoDraftReason)
        assert sum(rows.values()) == sum(by_choice.values())
        assert sum(reasons.values()) == rows.get("0", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_counted_by_number_of_drafts(kind: Kind, tmp_path: Path) -> None:
    play = Play(kind, tmp_path)
    for name in "abc":
        play.admit(name)
    assert play.step() == {}, "a prompt's end has no drafts to verify"
    assert ROWS not in play.counted
    assert play.step({"a": 3, "b": 1}) == {"nothing": 1}
    assert play.step({"a": 3}, why={"b": "unverified", "c": "fault"}) == {"unverified": 1, "fault": 1}
    assert play.counted[ROWS] == {"0": 3, "1": 1, "3": 2}
    assert play.counted[ROWS_BY_CHOICE] == {"3": 6}
    play.check()


@pytest.mark.parametrize("kind", KINDS)
def test_reasons_that_follow_from_the_request(kind: Kind, tmp_path: Path) -> None:
    longest = len(PROMPT) + 4
    play = Play(kind, tmp_path)
    play.admit("none", extra_args={"num_speculative_tokens": 0})
    play.admit("one", extra_args={"num_speculative_tokens": 1})
    play.admit("short", max_tokens=3)
    assert play.step() == {}
    assert play.step({"one": 1, "short": 1}) == {"request": 1}
    assert play.step({"one": 1}) == {"request": 1, "ending": 1}, "the third token of three"
    assert not play.scheduler.requests.get("short")
    play.scheduler._draft_counts._max_context = longest
    seen = [play.step({"one": 1 if length < longest else 0}) for length in range(len(PROMPT) + 3, longest + 2)]
    assert seen == [{"request": 1}, {"request": 1, "length": 1}, {"request": 1, "length": 1}]
    play.check()


def test_drafters_maximum_length_is_a_reason(tmp_path: Path) -> None:
    play = Play(SpecScheduler, tmp_path, speculative=dict(max_model_len=len(PROMPT) + 2))
    play.admit("a")
    play.step()
    assert [play.step(), play.step(), play.step()] == [{"nothing": 1}, {"length": 1}, {"length": 1}]


@pytest.mark.parametrize("kind", KINDS)
def test_reason_with_schedule_by_batch_size(kind: Kind, tmp_path: Path) -> None:
    play = Play(kind, tmp_path, speculative=dict(num_speculative_tokens_per_batch_size=[[1, 1, 2], [2, 64, 0]]))
    play.admit("a")
    play.step()
    play.step({"a": 2})
    play.admit("b")
    play.step({"a": 2})  # after this one nothing is drafted any more
    assert play.step() == {"load": 2}
    assert play.counted[ROWS_BY_CHOICE] == {"2": 2, "0": 2}
    play.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    assert play.step() == {"load": 1}
    assert play.step() == {"nothing": 1}
    play.check()


@pytest.mark.parametrize("kind", KINDS)
def test_reason_of_adaptive_verification_belongs_to_next_drafts(kind: Kind, tmp_path: Path) -> None:
    play = Play(kind, tmp_path, speculative=ADAPTIVE)
    for name in "ab":
        play.admit(name)
    play.scheduler._step_times = Chooses(1)
    play.step()
    assert play.step({"a": 1}) == {"nothing": 1}
    assert play.counted[ROWS_BY_CHOICE] == {"1": 2}
    play.scheduler._step_times = Chooses(0)
    assert play.step({"a": 1}) == {"nothing": 1}
    assert play.step() == {"goodput": 2}
    play.check()


def in_turn(play: Play, script: list[Step]) -> list[dict[str, float]]:
    reasons_of_steps = []
    for step in script:
        step.happens(play)
        reasons_of_steps.append(play.step(step.real))
    return reasons_of_steps


def ahead(play: Play, script: list[Step]) -> list[dict[str, float]]:
    """Each step is scheduled before the output of the one before it arrives, as with async scheduling."""
    reasons_of_steps, in_flight = [], None
    for step in script:
        step.happens(play)
        sent = play.send(step.real)
        if in_flight is not None:
            reasons_of_steps.append(play.on_drafter_status(*in_flight))
        in_flight = sent
    assert in_flight is not None
    return [*reasons_of_steps, play.on_drafter_status(*in_flight)]


class Step(NamedTuple):
    real: dict[str, int]
    chosen: int | None = None
    """The number of drafts that is chosen from here on."""
    admitted: str = ""

    def happens(self, play: Play) -> None:
        if self.chosen is not None:
            play.scheduler._step_times = Chooses(self.chosen)
        for name in self.admitted:
            play.admit(name)


@pytest.mark.parametrize("go", [in_turn, ahead])
def test_choice_is_counted_when_its_drafts_are_verified(go: Any, tmp_path: Path) -> None:
    """That is one step later, though the next choice may already be made when the step's output arrives."""
    play = Play(SpecAsyncScheduler, tmp_path, speculative=ADAPTIVE)
    script = [
        Step({}, chosen=3, admitted="ab"),
        Step({"a": 3}, chosen=0),
        Step({}, admitted="c", chosen=1),
        Step({"b": 1, "c": 1}, chosen=0),
        Step({}),
    ]
    assert go(play, script) == [{}, {"nothing": 1}, {"goodput": 2}, {"nothing": 1}, {"goodput": 3}]
    assert play.counted[ROWS_BY_CHOICE] == {"3": 2, "0": 2 + 3, "1": 3}
    play.check()
    counts = play.scheduler._draft_counts
    assert set(counts._choices) == set("abc")
    play.scheduler.finish_requests(["a", "b", "c"], RequestStatus.FINISHED_ABORTED)
    play.step()
    assert not counts._choices


@pytest.mark.parametrize("kind", KINDS)
def test_fault_is_counted_as_reason(kind: Kind, tmp_path: Path) -> None:
    play = Play(kind, tmp_path)
    for name in "ab":
        play.admit(name)
    play.step(draft_rounds=[DraftRound(("a",), worked=True)])
    assert play.step({"b": 1}) == {"fault": 1}, "the host saw it a step before"
    play.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    play.step({"b": 1})
    play.admit("c")
    play.step({"b": 1})
    bad = dict(draft_rounds=[DraftRound(("b", "c"), worked=False)], why={"b": "fault", "c": "fault"})
    assert play.step(**bad) == {"fault": 2}, "the device sees it where the drafts are to be verified"
    assert play.step() == {"nothing": 2}
    for _ in range(2):
        play.step(**bad)
    play.step(**bad)
    assert play.step() == {"off": 2}
    play.check()


def test_fault_is_kept_until_the_requests_next_step(tmp_path: Path) -> None:
    """A step may go by without its row, for want of budget."""
    speculation, counted = Speculation.from_vllm(engine_config(tmp_path, dict(method="ngram"))), metrics.StepMetrics()
    assert speculation is not None
    counts = DraftCounts(speculation, 64, counted)
    play, failed = Play(SpecScheduler, tmp_path), [DraftRound(("a",), worked=True)]
    for name in "ab":
        play.admit(name)
    play.step()
    scheduled = play.send()[0]

    def step_of(*names: str, **more: Any) -> dict[str, float]:
        worker_output: Any = answer({name: [9] for name in names}, dict.fromkeys(names, 0))
        vars(worker_output).update(more)
        counts.observe(play.scheduler.requests, scheduled, worker_output)
        return counted.take().get(ROWS_WITHOUT_DRAFTS, {})

    step_of("a", "b", draft_rounds=failed)
    assert step_of("b") == {"nothing": 1}
    assert step_of("a", "b") == {"fault": 1, "nothing": 1}
    assert step_of("a", "b") == {"nothing": 2}
    step_of("a", draft_rounds=failed)
    counts.forget({"a"})
    assert step_of("a") == {"nothing": 1}, "another one of that name"


def test_excluded_request_has_fault_as_reason(tmp_path: Path) -> None:
    play = Play(SpecScheduler, tmp_path)
    for name in "ab":
        play.admit(name)
    play.step(draft_rounds=[DraftRound(("a",), worked=True)])
    for _ in range(3):
        assert play.step({"b": 1}) == {"fault": 1}
    play.scheduler.finish_requests(["a", "b"], RequestStatus.FINISHED_ABORTED)
    play.admit("a")
    play.step()
    assert play.step() == {"nothing": 1}, "another one of that name"


def test_rows_of_finished_requests_are_not_counted(tmp_path: Path) -> None:
    """As vLLM counts no drafts of them."""
    play = Play(SpecAsyncScheduler, tmp_path)
    for name in "ab":
        play.admit(name)
    play.step()
    scheduled = play.scheduler.schedule()
    play.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    worker_output: Any = answer({"a": [9], "b": [9]}, {"a": 2, "b": 1})
    stats = play.scheduler.update_from_output(scheduled, worker_output)[0].scheduler_stats
    assert stats.gaudi_spec == {ROWS: {"1": 1}, ROWS_BY_CHOICE: {str(NUM_DRAFTS): 1}}
    assert stats.spec_decoding_stats.num_drafts == 1


def test_rows_with_stale_output_are_not_counted(tmp_path: Path) -> None:
    """They begin anew, and vLLM's own figures know nothing of them."""
    play = Play(SpecAsyncScheduler, tmp_path)
    for name in "ab":
        play.admit(name)
    play.step()
    play.step({"a": 1, "b": 2})
    before = {name: dict(figures) for name, figures in play.counted.items()}
    lost = play.send({"a": 3})
    assert play.scheduler.reset_prefix_cache(reset_running_requests=True)
    again = play.send()
    assert play.on_drafter_status(*lost) == {}
    assert play.on_drafter_status(*again) == {}, "a prompt's end"
    assert play.counted == before
    assert play.step({"a": 3}) == {"nothing": 1}
    assert play.counted[ROWS] == {"0": 1, "1": 1, "2": 1, "3": 1}
    play.check()


@pytest.mark.parametrize("kind", [SpecAsyncScheduler])
def test_vllm_stats_count_only_steps_that_verified_drafts(kind: Kind, tmp_path: Path) -> None:
    """Whoever reads it divides by them."""
    play = Play(kind, tmp_path)
    play.admit("a")
    worker_output = []
    for number in (0, 0, 2, 0):
        scheduled = play.scheduler.schedule()
        made: Any = answer({"a": [9]}, {"a": number})
        stats = play.scheduler.update_from_output(scheduled, made)[0].scheduler_stats
        assert stats.gaudi_spec
        worker_output.append(stats.spec_decoding_stats and stats.spec_decoding_stats.num_draft_tokens)
    assert worker_output == [None, None, 2, None]


def test_worker_counts_become_metrics(tmp_path: Path) -> None:
    play = Play(SpecScheduler, tmp_path)
    play.admit("a")
    coverage = {"target": 0.5, "drafter": 0.75}
    play.step(worked=WorkerCounts(4, 3, 0, coverage))
    assert play.counted == {STEPS: {"": 4}, HOST_SYNCS: {"": 3}, COVERAGE: coverage}
    worked = WorkerCounts(5, 4, 2, coverage, num_prefill_tokens=100, num_prefill_padding=28)
    play.step(worked=worked)
    assert play.counted[PREFILL_TOKENS] == {"real": 100, "padding": 28}
    play.step(worked=worked._replace(num_prefill_padding=40))
    assert play.counted[PREFILL_TOKENS] == {"real": 100, "padding": 40}
    assert [play.counted[name][""] for name in (STEPS, HOST_SYNCS, COMPILED)] == [5, 4, 2]
    assert play.counted[COVERAGE] == coverage


def test_nothing_is_counted_without_log_stats(tmp_path: Path) -> None:
    """--disable-log-stats."""
    play = Play(SpecScheduler, tmp_path, speculative=ADAPTIVE)
    play.scheduler.log_stats = False
    play.admit("a")
    for _ in range(3):
        play.step(worked=WorkerCounts(1, 1, 0, {}))
    assert not play.counted
    assert not play.scheduler.step_metrics.take()

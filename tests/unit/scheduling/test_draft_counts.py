"""Rows that decode are counted by their drafts, and those without by the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from tests.support.schedulers import NUM_DRAFTS, PROMPT, answer, scheduler_of
from vllm_gaudi_spec import metrics, upstream
from vllm_gaudi_spec.metrics import (
    ROWS,
    ROWS_BY_CHOICE,
    ROWS_WITHOUT_DRAFTS,
)
from vllm_gaudi_spec.records import DraftRound, NoDraftReason
from vllm_gaudi_spec.scheduling.scheduler import SpecAsyncScheduler, SpecScheduler

Kind = type[SpecScheduler | SpecAsyncScheduler]
KINDS = [SpecScheduler, SpecAsyncScheduler]


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

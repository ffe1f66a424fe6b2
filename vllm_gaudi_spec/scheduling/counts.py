"""Rows that decode: with how many drafts, and why some have none.

Counted where vLLM schedules: it knows how long a row is and what it asked for, it decides how much is drafted, and what
the worker alone knows comes with the step's output. So nothing is read or sent for it.
"""

from __future__ import annotations

from typing import Any

from vllm_gaudi_spec.config import Speculation, asked_drafts, last_use
from vllm_gaudi_spec.records import WorkerCounts
from vllm_gaudi_spec.scheduling import metrics

_COUNTS = "_gaudi_spec_draft_counts"


class DraftCounts:
    def __init__(self, speculation: Speculation, max_model_len: int) -> None:
        self._num_drafts = speculation.num_drafts
        self._longest = speculation.longest(max_model_len)
        self._choices: dict[str, tuple[int, str]] = {}
        """The most drafts that pacing left a request behind its newest step, and the reason if that is none. Whoever
        is not here may have all."""
        self._excluded: set[str] = set()
        """Requests that draft no more."""
        self._failed: set[str] = set()
        """Requests for which the drafter failed behind their newest row: the next one may come steps later."""

    def exclude(self, req_ids: tuple[str, ...]) -> None:
        self._excluded.update(req_ids)

    def forget(self, req_ids: set[str]) -> None:
        self._excluded -= req_ids
        self._failed -= req_ids
        for req_id in req_ids:
            self._choices.pop(req_id, None)

    def count(self, scheduler: Any, output: Any) -> None:
        """A step's output came; `scheduler` has not looked at it yet."""
        verified, chosen = ([0] * (self._num_drafts + 1) for _ in range(2))
        reasons: dict[str, int] = {}
        started, why = getattr(output, "started", ()), getattr(output, "why", {})
        for req_id, num_drafts in output.num_real_drafts.items():
            request = scheduler.requests.get(req_id)
            if request is None or request.is_finished() or req_id in started or _is_dropped(request):
                continue
            most, spared_for = self._choices.get(req_id, (self._num_drafts, ""))
            verified[num_drafts] += 1
            chosen[most] += 1
            if not num_drafts:
                reason = why.get(req_id) or self._reason(request, spared_for)
                reasons[reason] = reasons.get(reason, 0) + 1
        for name, rows in ((metrics.ROWS, verified), (metrics.ROWS_BY_CHOICE, chosen)):
            for number, more in enumerate(rows):
                if more:
                    metrics.count(scheduler, name, more, str(number))
        for reason, more in reasons.items():
            metrics.count(scheduler, metrics.ROWS_WITHOUT_DRAFTS, more, reason)

    def _reason(self, request: Any, spared_for: str) -> str:
        """What lasts comes before what passes."""
        if not asked_drafts(request.sampling_params, self._num_drafts):
            return metrics.REQUEST
        if request.request_id in self._excluded:
            return metrics.FAULT
        if request.num_tokens >= last_use(request.num_prompt_tokens, request.max_tokens):
            return metrics.ENDING
        if request.num_tokens >= self._longest:
            return metrics.LENGTH
        return spared_for or (metrics.FAULT if request.request_id in self._failed else metrics.NOTHING)

    def remember(self, scheduled: Any, output: Any) -> None:
        """What was decided with this step is of the drafts behind it, which a later one verifies."""
        most, own = scheduled.num_spec_tokens_to_schedule, getattr(scheduled, "most_drafts", {})
        if self._choices or own or most < self._num_drafts:
            spared_for = getattr(scheduled, "spared_for", metrics.LOAD)
            for req_id in output.num_real_drafts:
                choice = min(most, own.get(req_id, most))
                reason = "" if choice else metrics.ACCEPTANCE if most else spared_for
                self._choices[req_id] = choice, reason
        rounds, why = getattr(output, "draft_rounds", ()), getattr(output, "why", {})
        # What the device saw is of the drafts that this step was to verify.
        self._failed.difference_update(output.num_real_drafts)
        self._failed.update(req_id for done in rounds for req_id in done.faulty if why.get(req_id) != metrics.FAULT)


def _is_dropped(request: Any) -> bool:
    """Whether vLLM throws away what a step in flight says of it: its cache was reset, and it begins anew."""
    return bool(request.drop_stale_output and request.num_stale_output_tokens > 0)


# --- a scheduler of vLLM's ---


def hear(scheduler: Any, scheduled: Any, output: Any) -> None:
    """A step is done."""
    if not getattr(scheduler, "log_stats", False):  # a subclass may leave vLLM's constructor out
        return
    if (worked := getattr(output, "worked", None)) is not None:
        _hear_worker(scheduler, worked)
    counts = _counts_of(scheduler)
    if counts is None:
        return
    if scheduled.finished_req_ids:
        counts.forget(scheduled.finished_req_ids)
    if getattr(output, "num_real_drafts", None):
        counts.count(scheduler, output)
        counts.remember(scheduled, output)


def exclude(scheduler: Any, req_ids: tuple[str, ...]) -> None:
    """These draft no more."""
    if counts := vars(scheduler).get(_COUNTS):
        counts.exclude(req_ids)


def _counts_of(scheduler: Any) -> DraftCounts | None:
    known = vars(scheduler)
    if _COUNTS not in known:
        given = Speculation.from_vllm(scheduler.vllm_config)
        known[_COUNTS] = given and DraftCounts(given, scheduler.vllm_config.model_config.max_model_len)
    counts: DraftCounts | None = known[_COUNTS]
    return counts


def _hear_worker(scheduler: Any, worked: WorkerCounts) -> None:
    metrics.total(scheduler, metrics.STEPS, worked.steps)
    metrics.total(scheduler, metrics.HOST_READS, worked.host_reads)
    metrics.total(scheduler, metrics.COMPILED, worked.compiled)
    for vocabulary, share in worked.coverage.items():
        metrics.put(scheduler, metrics.COVERAGE, share, vocabulary)

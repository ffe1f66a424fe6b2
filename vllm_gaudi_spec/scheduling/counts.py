"""Rows that decode: with how many drafts, and why some have none.

Counted where vLLM schedules: it knows how long a row is and what it asked for, it decides how much is drafted, and what
the worker alone knows comes with the step's output. So nothing is read or sent for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_gaudi_spec.config import Speculation
from vllm_gaudi_spec.scheduling import metrics
from vllm_gaudi_spec.scheduling.limits import NOTHING_PROPOSED, DraftLimits, Reason, why_no_drafts
from vllm_gaudi_spec.scheduling.metrics import StepMetrics

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_gaudi_spec.scheduling.outputs import SpecSchedulerOutput, SpeculativeOutput

logger = init_logger(__name__)


class DraftCounts:
    def __init__(self, speculation: Speculation, max_model_len: int, step_metrics: StepMetrics) -> None:
        self._num_drafts = speculation.num_drafts
        self._max_context = speculation.longest(max_model_len)
        self._metrics = step_metrics
        self._choices: dict[str, tuple[int, str]] = {}
        """The most drafts that pacing left a request after its newest step, and the reason if that is none. A request
        that is not here may have all."""
        self._excluded: set[str] = set()
        """Requests that draft no more."""
        self._failed: set[str] = set()
        """Requests for which the drafter failed after their newest row: the next one may come steps later."""
        self._logged: dict[str, str] = {}
        """The label of the reason that the log last gave for a request."""

    def exclude(self, req_ids: tuple[str, ...]) -> None:
        self._excluded.update(req_ids)

    def observe(
        self, requests: Mapping[str, Request], scheduled: SpecSchedulerOutput, output: SpeculativeOutput
    ) -> None:
        """A step's output came, and vLLM's scheduler has not looked at it yet."""
        if output.num_real_drafts:
            self.count(requests, output)
            self.remember(scheduled, output)

    def forget(self, req_ids: set[str]) -> None:
        self._excluded -= req_ids
        self._failed -= req_ids
        for req_id in req_ids:
            self._choices.pop(req_id, None)
            self._logged.pop(req_id, None)

    def count(self, requests: Mapping[str, Request], output: SpeculativeOutput) -> None:
        verified, chosen, reasons = Counter[str](), Counter[str](), Counter[str]()
        for req_id, num_drafts in output.num_real_drafts.items():
            request = requests.get(req_id)
            if request is None or request.is_finished() or req_id in output.started or _is_dropped(request):
                continue
            max_drafts, skip_reason = self._choices.get(req_id, (self._num_drafts, ""))
            verified[str(num_drafts)] += 1
            chosen[str(max_drafts)] += 1
            if not num_drafts:
                reason = self._reason(request, output.why.get(req_id, ""), skip_reason)
                reasons[reason.label] += 1
                self._log(req_id, reason)
        for name, rows in (
            (metrics.ROWS, verified),
            (metrics.ROWS_BY_CHOICE, chosen),
            (metrics.ROWS_WITHOUT_DRAFTS, reasons),
        ):
            for value, more in rows.items():
                self._metrics.count(name, more, value)

    def _reason(self, request: Request, reported: str, skip_reason: str) -> Reason:
        assert request.sampling_params is not None
        limits = DraftLimits.of(
            request.sampling_params,
            request.num_prompt_tokens,
            num_drafts=self._num_drafts,
            max_context=self._max_context,
        )
        reason = why_no_drafts(
            limits,
            request.num_tokens,
            reported=reported,
            is_excluded=request.request_id in self._excluded,
            skip_reason=skip_reason,
            has_failed=request.request_id in self._failed,
        )
        return reason or NOTHING_PROPOSED

    def _log(self, req_id: str, reason: Reason) -> None:
        """Only a reason that is another one than the last: a request may have the same at every step."""
        if self._logged.get(req_id) != reason.label:
            self._logged[req_id] = reason.label
            logger.debug("request %s: no drafts: %s", req_id, reason.detail)

    def remember(self, scheduled: SpecSchedulerOutput, output: SpeculativeOutput) -> None:
        """What was decided with this step is of the drafts after it, which a later one verifies."""
        most = scheduled.num_spec_tokens_to_schedule
        if self._choices or scheduled.max_drafts or most < self._num_drafts:
            for req_id in output.num_real_drafts:
                choice = min(most, scheduled.max_drafts.get(req_id, most))
                reason = "" if choice else metrics.ACCEPTANCE if most else scheduled.skip_reason
                self._choices[req_id] = choice, reason
        # What the device saw is of the drafts that this step was to verify.
        self._failed.difference_update(output.num_real_drafts)
        self._failed.update(
            req_id for done in output.draft_rounds for req_id in done.faulty if output.why.get(req_id) != metrics.FAULT
        )


def _is_dropped(request: Request) -> bool:
    """Whether vLLM throws away what a step in flight reports of it: its cache was reset, and it begins anew."""
    return bool(request.drop_stale_output and request.num_stale_output_tokens > 0)

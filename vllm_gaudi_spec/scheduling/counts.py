"""Counts of decoding requests by number of drafts, and of the reasons why requests have no drafts.

Requests are counted in the scheduler, which knows their lengths and parameters and decides how many tokens to draft.
Information from workers arrives with the output of each step, so counting needs no extra sync or message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_gaudi_spec import metrics
from vllm_gaudi_spec.config import Speculation
from vllm_gaudi_spec.metrics import StepMetrics
from vllm_gaudi_spec.records import NoDraftReason
from vllm_gaudi_spec.scheduling.limits import DraftLimits, explain_no_drafts

if TYPE_CHECKING:
    from vllm_gaudi_spec.outputs import SpecSchedulerOutput, SpeculativeOutput
    from vllm_gaudi_spec.upstream.scheduler import Request

logger = init_logger(__name__)


class DraftCounts:
    """Counts requests that decode with drafts and those that decode without."""

    def __init__(self, speculation: Speculation, max_model_len: int, step_metrics: StepMetrics) -> None:
        self._num_drafts = speculation.num_drafts
        self._max_context = speculation.get_drafting_end(max_model_len)
        self._metrics = step_metrics
        self._choices: dict[str, tuple[int, str]] = {}
        """Maps each request to the maximum number of drafts after its latest step and, if that is 0, to the reason.
        Requests without an entry may have up to k drafts."""
        self._excluded: set[str] = set()
        """IDs of requests that are excluded from drafting."""
        self._failed: set[str] = set()
        """IDs of requests for which drafting failed after their latest step. Other steps may run before the next step
        of these requests."""
        self._logged: dict[str, str] = {}
        """Maps each request to the reason that was last logged for it."""

    def exclude(self, req_ids: tuple[str, ...]) -> None:
        self._excluded.update(req_ids)

    def observe(
        self, requests: Mapping[str, Request], scheduled: SpecSchedulerOutput, output: SpeculativeOutput
    ) -> None:
        """Count the requests in the output of a step. Call this before vLLM's scheduler processes it."""
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
        verified, chosen, reasons = Counter[int](), Counter[int](), Counter[str]()
        for req_id, num_drafts in output.num_real_drafts.items():
            request = requests.get(req_id)
            if request is None or request.is_finished() or req_id in output.started or _is_dropped(request):
                continue
            max_drafts, skip_reason = self._choices.get(req_id, (self._num_drafts, ""))
            verified[num_drafts] += 1
            chosen[max_drafts] += 1
            if not num_drafts:
                reason = self._reason(request, output.why.get(req_id, ""), skip_reason)
                reasons[reason] += 1
                if self._logged.get(req_id) != reason:  # the reason may be the same in every step
                    self._logged[req_id] = reason
                    logger.debug("Request %s has no drafts after %d tokens: %s.", req_id, request.num_tokens, reason)
        for name, rows in (
            (metrics.ROWS, verified),
            (metrics.ROWS_BY_CHOICE, chosen),
            (metrics.ROWS_WITHOUT_DRAFTS, reasons),
        ):
            for value, more in rows.items():
                self._metrics.count(name, more, str(value))

    def _reason(self, request: Request, reported: str, skip_reason: str) -> str:
        assert request.sampling_params is not None
        limits = DraftLimits.from_params(
            request.sampling_params,
            request.num_prompt_tokens,
            num_drafts=self._num_drafts,
            max_context=self._max_context,
        )
        return explain_no_drafts(
            limits,
            request.num_tokens,
            reported=reported,
            is_excluded=request.request_id in self._excluded,
            skip_reason=skip_reason,
            has_failed=request.request_id in self._failed,
        )

    def remember(self, scheduled: SpecSchedulerOutput, output: SpeculativeOutput) -> None:
        """Record this step's decision about the drafts that a later step verifies."""
        max_drafts = scheduled.num_spec_tokens_to_schedule
        if self._choices or max_drafts < self._num_drafts:
            choice = max_drafts, "" if max_drafts else scheduled.skip_reason
            self._choices.update(dict.fromkeys(output.num_real_drafts, choice))
        # Reported faults refer to the drafts that this step should have verified.
        self._failed.difference_update(output.num_real_drafts)
        self._failed.update(
            req_id
            for done in output.draft_rounds
            for req_id in done.faulty
            if output.why.get(req_id) != NoDraftReason.FAULT
        )


def _is_dropped(request: Request) -> bool:
    """Whether vLLM discards the output of the request's step in flight because the prefix cache was reset."""
    return bool(request.drop_stale_output and request.num_stale_output_tokens > 0)

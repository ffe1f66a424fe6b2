"""The limits of a request's drafts, and why it has none. Shared by the scheduler and the runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_spec.config import last_use, requested_drafts
from vllm_gaudi_spec.scheduling import metrics

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


class DraftLimits(NamedTuple):
    """From a request's parameters and the start-up configuration: the same on every rank and in the scheduler."""

    max_context: int
    """The longest context including drafts: the drafter's, or the model's."""
    end: int | None
    """The length at which one more token is the request's last; None without max_tokens."""
    max_drafts: int
    """The most drafts that the request asked for in a step."""

    @classmethod
    def of(cls, params: SamplingParams, num_prompt: int, *, num_drafts: int, max_context: int) -> DraftLimits:
        end = None if params.max_tokens is None else last_use(num_prompt, params.max_tokens)
        return cls(max_context, end, requested_drafts(params, num_drafts))

    @property
    def reach(self) -> int:
        """The length from which on the request has no drafts."""
        return self.max_context if self.end is None else min(self.max_context, self.end)


class Reason(NamedTuple):
    """Why a request has no drafts."""

    label: str
    """One of `metrics.REASONS`."""
    detail: str
    """For the log."""


NOTHING_PROPOSED = Reason(metrics.NOTHING, "the drafter had nothing to propose, or has not read the request yet")

_REPORTED = {
    metrics.LENGTH: "its text has outgrown what the drafter can keep of it",
    metrics.UNVERIFIED: "a grammar, the token budget or the end of max_model_len left none to verify",
    metrics.FAULT: "its drafts could not be used",
}
"""Reasons that only a worker can know."""
_SKIPPED = {
    metrics.LOAD: "the schedule by batch size drafts nothing",
    metrics.GOODPUT: "drafting was slower",
    metrics.ACCEPTANCE: "too few of its drafts were accepted",
    metrics.OFF: "the drafter was switched off after faults",
}
"""Reasons of a scheduler that chose 0 drafts."""


def why_no_drafts(
    limits: DraftLimits,
    length: int,
    *,
    reported: str = "",
    is_excluded: bool = False,
    skip_reason: str = "",
    has_failed: bool = False,
) -> Reason | None:
    """Why a request of `length` tokens has no drafts; None if no limit forbids them. A lasting reason comes before a
    passing one.

    `reported`: the label that a worker reported; `is_excluded`: it was excluded from drafting after faults;
    `skip_reason`: the label under which the scheduler chose 0 drafts; `has_failed`: its newest drafts could not be
    used.
    """
    if reported:
        return Reason(reported, _REPORTED[reported])
    if not limits.max_drafts:
        return Reason(metrics.REQUEST, "it asked for none")
    if is_excluded:
        return Reason(metrics.FAULT, "it was excluded from drafting, as its drafts could not be used")
    if limits.end is not None and length >= limits.end:
        return Reason(metrics.ENDING, f"length {length} >= {limits.end}, one more token is its last")
    if length >= limits.max_context:
        return Reason(metrics.LENGTH, f"context {length} >= {limits.max_context}")
    if skip_reason:
        return Reason(skip_reason, _SKIPPED[skip_reason])
    return Reason(metrics.FAULT, _REPORTED[metrics.FAULT]) if has_failed else None

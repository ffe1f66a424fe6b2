"""Structured output of a step: masks by position, and how many drafts each grammar allows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput


class Grammar(NamedTuple):
    """The grammar of one request in this step."""

    mask_NW: np.ndarray
    """int32 bitmask of its first N positions; drafts after them are not constrained and must not be accepted."""
    num_acceptable: int
    """Drafts that the grammar allows."""


def read(output: GrammarOutput | None, scheduled: SchedulerOutput) -> dict[str, Grammar]:
    """Constrained requests of a step. vLLM lays their masks end to end: a row for each scheduled draft and one more."""
    if output is None:
        return {}
    grammars, begin = {}, 0
    for index, req_id in enumerate(output.structured_output_request_ids):
        num_drafts = len(scheduled.scheduled_spec_decode_tokens.get(req_id, ()))
        end = begin + 1 + num_drafts
        acceptable = num_drafts if output.num_acceptable_drafts is None else output.num_acceptable_drafts[index]
        grammars[req_id] = Grammar(output.grammar_bitmask[begin:end], acceptable)
        begin = end
    return grammars

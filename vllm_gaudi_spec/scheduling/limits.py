"""Limits on the number of drafts for each request, and reasons for having none, for the scheduler and the runner.

A request drafts fewer tokens, or none, as it approaches the maximum context length of the drafter or the model, or the
end of its requested output. A limit depends only on the length and the parameters of the request itself, so every rank
computes the same limit, and a long request does not affect other requests in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm_gaudi_spec.config import REQUEST_OPTION
from vllm_gaudi_spec.records import NoDraftReason

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_gaudi_spec.config import Speculation


class DraftLimits(NamedTuple):
    """Limits from a request's parameters and the configuration, the same on all ranks and in the scheduler."""

    max_context: int
    """Maximum length of context and drafts combined, which the drafter or the model imposes."""
    end: int | None
    """Length after which the request samples only one more token, or None without max_tokens."""
    max_drafts: int
    """Maximum number of drafts per step: the number that the request asks for, but at most k."""

    @classmethod
    def from_params(cls, params: SamplingParams, num_prompt: int, *, num_drafts: int, max_context: int) -> DraftLimits:
        end = None if params.max_tokens is None else num_prompt + params.max_tokens - 1
        return cls(max_context, end, get_requested_drafts(params, num_drafts))

    @property
    def reach(self) -> int:
        """Length at which the request stops drafting."""
        return self.max_context if self.end is None else min(self.max_context, self.end)


def get_requested_drafts(params: SamplingParams | None, num_drafts: int) -> int:
    """Return the maximum number of drafts per step that a request asks for, but at most `num_drafts`."""
    requested: int = ((params and params.extra_args) or {}).get(REQUEST_OPTION, num_drafts)
    return min(requested, num_drafts)


def explain_no_drafts(
    limits: DraftLimits,
    length: int,
    *,
    reported: str = "",
    is_excluded: bool = False,
    skip_reason: str = "",
    has_failed: bool = False,
) -> str:
    """Return the `NoDraftReason` for a request with `length` tokens, or `NOTHING` if no limit prevents drafts.

    Permanent reasons take precedence over temporary ones.

    Args:
        reported: The reason that a worker has reported.
        is_excluded: Whether the request is excluded from drafting after faults.
        skip_reason: The reason why the scheduler chose 0 drafts.
        has_failed: Whether the request's latest drafts were unusable.
    """
    if reported:
        return reported
    if not limits.max_drafts:
        return NoDraftReason.REQUEST
    if is_excluded:
        return NoDraftReason.FAULT
    if limits.end is not None and length >= limits.end:
        return NoDraftReason.ENDING
    if length >= limits.max_context:
        return NoDraftReason.LENGTH
    return skip_reason or (NoDraftReason.FAULT if has_failed else NoDraftReason.NOTHING)


# --- rows in the runner ---


class RowLimits:
    """The maximum number of drafts for each row, stored on the host."""

    def __init__(self, max_rows: int, speculation: Speculation, max_model_len: int) -> None:
        self._num_drafts = speculation.num_drafts
        self._max_len = speculation.longest(max_model_len)
        self._limits_np = np.zeros((max_rows + 1, 2), dtype=np.int32)
        """Maximum length of context and drafts combined, and maximum number of drafts, for each row."""

    def admit(self, row: int, params: SamplingParams, num_prompt: int) -> None:
        limits = DraftLimits.from_params(params, num_prompt, num_drafts=self._num_drafts, max_context=self._max_len)
        self._set(row, limits.reach, limits.max_drafts)

    def exclude(self, row: int) -> None:
        """Disable drafting in the row until another request is admitted to it."""
        self._set(row, int(self._limits_np[row, 0]), 0)

    def _set(self, row: int, reach: int, max_drafts: int) -> None:
        self._limits_np[row] = reach, max_drafts

    def compute_max_drafts(self, rows_np: np.ndarray, lengths_np: np.ndarray, limit: int | np.ndarray) -> np.ndarray:
        """Return the number of drafts, at most `limit`, that rows with these lengths can use, int32 [B]."""
        limits_B2, lengths_B = torch.from_numpy(self._limits_np[rows_np]), torch.from_numpy(lengths_np)
        return np.minimum(apply_limits(limits_B2, lengths_B).numpy(), limit).astype(np.int32)


def apply_limits(limits_B2: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Return the number of drafts that rows with these lengths can use, int32 [B]."""
    return torch.minimum(limits_B2[:, 0] - lengths_B, limits_B2[:, 1]).clamp(min=0).int()

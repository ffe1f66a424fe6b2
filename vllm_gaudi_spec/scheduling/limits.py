"""The limits of a request's drafts, and why it has none: for the scheduler, and row by row for the runner.

A request drafts fewer tokens, down to none, as its context nears the drafter's longest, the model's longest, or the end
of the output that was requested. How many it may draft follows from its own length and from its parameters at
admission: every rank decides alike, and a long request costs its neighbors nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm_gaudi_spec.config import REQUEST_OPTION
from vllm_gaudi_spec.device_rows import DeviceRows
from vllm_gaudi_spec.records import NoDraftReason

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_gaudi_spec.config import Speculation
    from vllm_gaudi_spec.devices.base import DeviceBackend


class DraftLimits(NamedTuple):
    """From a request's parameters and the start-up configuration: the same on every rank and in the scheduler."""

    max_context: int
    """The longest context including drafts: the drafter's, or the model's."""
    end: int | None
    """The length at which one more token is the request's last; None without max_tokens."""
    max_drafts: int
    """The most drafts that the request asked for in a step, k at most."""

    @classmethod
    def of(cls, params: SamplingParams, num_prompt: int, *, num_drafts: int, max_context: int) -> DraftLimits:
        end = None if params.max_tokens is None else num_prompt + params.max_tokens - 1
        requested = (params.extra_args or {}).get(REQUEST_OPTION, num_drafts)
        return cls(max_context, end, min(requested, num_drafts))

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


NOTHING_PROPOSED = Reason(NoDraftReason.NOTHING, "the drafter had nothing to propose, or has not read the request yet")

_REPORTED: dict[str, str] = {
    NoDraftReason.LENGTH: "its text has outgrown what the drafter can keep of it",
    NoDraftReason.UNVERIFIED: "a grammar, the token budget or the end of max_model_len left none to verify",
    NoDraftReason.FAULT: "its drafts could not be used",
}
"""Reasons that only a worker can know."""
_SKIPPED: dict[str, str] = {
    NoDraftReason.LOAD: "the schedule by batch size drafts nothing",
    NoDraftReason.GOODPUT: "drafting was slower",
    NoDraftReason.ACCEPTANCE: "too few of its drafts were accepted",
    NoDraftReason.OFF: "the drafter was switched off after faults",
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
        return Reason(NoDraftReason.REQUEST, "it asked for none")
    if is_excluded:
        return Reason(NoDraftReason.FAULT, "it was excluded from drafting, as its drafts could not be used")
    if limits.end is not None and length >= limits.end:
        return Reason(NoDraftReason.ENDING, f"length {length} >= {limits.end}, one more token is its last")
    if length >= limits.max_context:
        return Reason(NoDraftReason.LENGTH, f"context {length} >= {limits.max_context}")
    if skip_reason:
        return Reason(skip_reason, _SKIPPED[skip_reason])
    return Reason(NoDraftReason.FAULT, _REPORTED[NoDraftReason.FAULT]) if has_failed else None


# --- rows of the runner ---


class LengthSplit:
    """By row: how many drafts it may have, on the host and on the device."""

    def __init__(self, backend: DeviceBackend, max_rows: int, speculation: Speculation, max_model_len: int) -> None:
        self._num_drafts = speculation.num_drafts
        self._max_len = speculation.longest(max_model_len)
        self._limits_np = np.zeros((max_rows + 1, 2), dtype=np.int32)
        """By row: the length that context and drafts together may reach, and the most drafts. Zeros for the pad row."""
        self.on_device = DeviceRows(backend, max_rows, np.zeros(2, dtype=np.int32))
        """The same, for lengths that only the device knows."""
        # By row: the most drafts that the scheduler requests after this step.
        self._paced_np = np.full(max_rows + 1, self._num_drafts, dtype=np.int32)

    def admit(self, row: int, params: SamplingParams, num_prompt: int) -> None:
        limits = DraftLimits.of(params, num_prompt, num_drafts=self._num_drafts, max_context=self._max_len)
        self._set(row, limits.reach, limits.max_drafts)

    def exclude(self, row: int) -> None:
        """The row drafts nothing as long as its request has it."""
        self._set(row, int(self._limits_np[row, 0]), 0)

    def _set(self, row: int, reach: int, max_drafts: int) -> None:
        self._limits_np[row] = reach, max_drafts
        self.on_device.set(row, self._limits_np[row].copy())

    def pace(self, limits: Iterable[tuple[int, int]]) -> None:
        """`limits`: rows that draft less for now, and their most drafts."""
        self._paced_np.fill(self._num_drafts)
        for row, limit in limits:
            self._paced_np[row] = limit

    def paced(self, rows_np: np.ndarray, limit: int) -> np.ndarray:
        """int32: the most drafts that the scheduler requests of these rows, at most `limit`."""
        return np.minimum(self._paced_np[rows_np], limit)

    def max_drafts_np(self, rows_np: np.ndarray, lengths_np: np.ndarray, limit: int | np.ndarray) -> np.ndarray:
        """int32 [B]: drafts that rows of these lengths have use for, at most `limit`."""
        limits_B2, lengths_B = torch.from_numpy(self._limits_np[rows_np]), torch.from_numpy(lengths_np)
        return np.minimum(max_drafts(limits_B2, lengths_B).numpy(), limit).astype(np.int32)

    def max_drafts_on_device(
        self, rows_B: torch.Tensor, lengths_B: torch.Tensor, limits_B: torch.Tensor
    ) -> torch.Tensor:
        """The same on the device; inside a graph."""
        limits_B2 = self.on_device.table_RX.index_select(0, rows_B)
        return torch.minimum(max_drafts(limits_B2, lengths_B), limits_B)


def max_drafts(limits_B2: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """int32 [B]: drafts that rows of these lengths have use for."""
    return torch.minimum(limits_B2[:, 0] - lengths_B, limits_B2[:, 1]).clamp(min=0).int()

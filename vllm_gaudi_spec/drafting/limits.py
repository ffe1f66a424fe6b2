"""Which rows can be speculated on, and how far: row by row, so that a long request costs its neighbours nothing.

A row drafts fewer tokens, down to none, as its context nears the drafter's longest, the model's longest, or the end of
the output that was requested. How many it may draft follows from its own length and from its parameters at admission:
every rank decides alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_gaudi_spec.scheduling.limits import DraftLimits

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_gaudi_spec.config import Speculation
    from vllm_gaudi_spec.devices.base import DeviceBackend


class LengthSplit:
    def __init__(self, backend: DeviceBackend, max_rows: int, speculation: Speculation, max_model_len: int) -> None:
        self._backend = backend
        self._num_drafts = speculation.num_drafts
        self._max_len = speculation.longest(max_model_len)
        # By row: the length that context and drafts together may reach, and the most drafts. Zeros for the pad row.
        self._limits_np = np.zeros((max_rows + 1, 2), dtype=np.int32)
        # By row: the most drafts that the scheduler requests after this step.
        self._paced_np = np.full(max_rows + 1, self._num_drafts, dtype=np.int32)

    def admit(self, row: int, params: SamplingParams, num_prompt: int) -> None:
        limits = DraftLimits.of(params, num_prompt, num_drafts=self._num_drafts, max_context=self._max_len)
        self._limits_np[row] = (limits.reach, limits.max_drafts)

    def exclude(self, row: int) -> None:
        """The row drafts nothing as long as its request has it."""
        self._limits_np[row, 1] = 0

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
        return max_drafts(torch.from_numpy(self._limits(rows_np, limit)), torch.from_numpy(lengths_np)).numpy()

    def upload(self, rows_np: np.ndarray, limit: int | np.ndarray) -> torch.Tensor:
        """int32 [B, 2]: what `max_drafts` takes, for lengths that only the device knows."""
        return self._backend.memory.upload(torch.from_numpy(self._limits(rows_np, limit)))

    def _limits(self, rows_np: np.ndarray, limit: int | np.ndarray) -> np.ndarray:
        limits_np = self._limits_np[rows_np]
        limits_np[:, 1] = np.minimum(limits_np[:, 1], limit)
        return limits_np


def max_drafts(limits_B2: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """int32 [B]: drafts that rows of these lengths have use for."""
    return torch.minimum(limits_B2[:, 0] - lengths_B, limits_B2[:, 1]).clamp(min=0).int()

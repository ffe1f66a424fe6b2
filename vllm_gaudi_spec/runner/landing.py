"""Where forwards leave what sampling needs, by row: so that sampling is one pass of its own shape, whatever rectangles
the step was cut into."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_gaudi_spec.runner.batch import Located, sampled_places
from vllm_gaudi_spec.runner.shapes import DECODE, PREFILL


class Landed(NamedTuple):
    hidden_NH: torch.Tensor
    """N = B * Q rows."""
    positions_BQ: torch.Tensor
    num_drafts_B: torch.Tensor
    """int32: drafts that the forward saw."""


class Landing:
    """By row: hidden states behind which tokens are sampled, the position of the first, and the number of drafts."""

    def __init__(
        self,
        num_rows: int,
        num_queries: int,
        longest_chunk: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._num_queries = num_queries
        self._hidden_NH = torch.zeros(num_rows * num_queries, hidden_size, dtype=dtype, device=device)
        """N = R * Q: one line of memory, changed as a whole."""
        self.chunk_TH = torch.zeros(longest_chunk, hidden_size, dtype=dtype, device=device)
        """Of the newest prompt chunk, all: for the scores of its tokens."""
        self._first_R = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._num_drafts_R = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def put(self, phase: str, queries: int, rows_B: torch.Tensor, located: Located, hidden_TH: torch.Tensor) -> None:
        places_BQ, positions_BQ = sampled_places(phase, queries, located)
        chosen_NH = hidden_TH.index_select(0, places_BQ.flatten())
        self._hidden_NH.index_copy_(0, self._index(rows_B, places_BQ.shape[1]), chosen_NH)
        self._first_R.index_copy_(0, rows_B, positions_BQ.select(1, 0))
        if phase == PREFILL:
            place_T = torch.arange(hidden_TH.shape[0], dtype=torch.int64, device=rows_B.device)
            self.chunk_TH.index_copy_(0, place_T, hidden_TH)
        if phase == DECODE:
            num_drafts_B = (located.num_real_B - 1).clamp(min=0)
        else:
            num_drafts_B = torch.zeros_like(located.num_real_B)
        self._num_drafts_R.index_copy_(0, rows_B, num_drafts_B)

    def take(self, rows_B: torch.Tensor, num_queries: int) -> Landed:
        place = torch.arange(num_queries, dtype=torch.int32, device=rows_B.device)
        return Landed(
            self._hidden_NH.index_select(0, self._index(rows_B, num_queries)),
            self._first_R.index_select(0, rows_B)[:, None] + place,
            self._num_drafts_R.index_select(0, rows_B),
        )

    def _index(self, rows_B: torch.Tensor, num_queries: int) -> torch.Tensor:
        place = torch.arange(num_queries, dtype=torch.int64, device=rows_B.device)
        return (rows_B[:, None] * self._num_queries + place).flatten()

"""Where forwards leave what sampling needs, by row: so that sampling is one pass of its own shape, whatever rectangles
the step was cut into."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from vllm_gaudi_spec.runner.batch import Batch


class Landed(NamedTuple):
    hidden_NH: torch.Tensor
    """N = B * Q rows."""
    positions_BQ: torch.Tensor
    num_drafts_B: torch.Tensor
    """int32: drafts that the forward saw."""


class Landing:
    """By row: hidden states behind which tokens are sampled, the position of the first, and the number of drafts."""

    def __init__(self, num_rows: int, num_queries: int, device: torch.device) -> None:
        self._hidden_RQH: torch.Tensor | None = None
        self._num_queries = num_queries
        self._first_R = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._num_drafts_R = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def put(self, batch: Batch, hidden_TH: torch.Tensor) -> None:
        if self._hidden_RQH is None:
            shape = (self._first_R.shape[0], self._num_queries, hidden_TH.shape[1])
            self._hidden_RQH = hidden_TH.new_zeros(shape)
        places_BQ, positions_BQ = batch.sampled_places()
        num_queries = places_BQ.shape[1]
        chosen = hidden_TH.index_select(0, places_BQ.flatten()).view(*places_BQ.shape, -1)
        self._hidden_RQH[:, :num_queries].index_copy_(0, batch.rows_B, chosen)
        self._first_R.index_copy_(0, batch.rows_B, positions_BQ[:, 0])
        if batch.shape.phase == "decode":
            num_drafts_B = (batch.num_real_B - 1).clamp(min=0)
        else:
            num_drafts_B = torch.zeros_like(batch.num_real_B)
        self._num_drafts_R.index_copy_(0, batch.rows_B, num_drafts_B)

    def take(self, rows_B: torch.Tensor, num_queries: int) -> Landed:
        assert self._hidden_RQH is not None
        place = torch.arange(num_queries, dtype=torch.int32, device=rows_B.device)
        return Landed(
            self._hidden_RQH.index_select(0, rows_B)[:, :num_queries].flatten(0, 1),
            self._first_R.index_select(0, rows_B)[:, None] + place,
            self._num_drafts_R.index_select(0, rows_B),
        )

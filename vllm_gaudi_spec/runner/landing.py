"""Where forwards leave what sampling needs, by row: so that sampling is one pass of its own shape, whatever rectangles
the step was cut into."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm_gaudi_spec.runner.batch import Batch


class Landing:
    """Hidden states [rows, Q, H] behind which tokens are sampled, and the position of the first of each row."""

    def __init__(self, num_rows: int, num_queries: int, device: torch.device) -> None:
        self._hidden_RQH: torch.Tensor | None = None
        self._num_queries = num_queries
        self._first_R = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def put(self, batch: Batch, hidden_TH: torch.Tensor) -> None:
        if self._hidden_RQH is None:
            shape = (self._first_R.shape[0], self._num_queries, hidden_TH.shape[1])
            self._hidden_RQH = hidden_TH.new_zeros(shape)
        places_BQ, positions_BQ = batch.sampled_places()
        num_queries = places_BQ.shape[1]
        chosen = hidden_TH.index_select(0, places_BQ.flatten()).view(*places_BQ.shape, -1)
        self._hidden_RQH[:, :num_queries].index_copy_(0, batch.rows_B, chosen)
        self._first_R.index_copy_(0, batch.rows_B, positions_BQ[:, 0])

    def take(self, rows_B: torch.Tensor, num_queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [B * Q, H] and positions [B, Q]."""
        assert self._hidden_RQH is not None
        place = torch.arange(num_queries, dtype=torch.int32, device=rows_B.device)
        hidden = self._hidden_RQH.index_select(0, rows_B)[:, :num_queries].flatten(0, 1)
        return hidden, self._first_R.index_select(0, rows_B)[:, None] + place

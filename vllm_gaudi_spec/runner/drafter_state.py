"""How far a drafter that is a model has read, row by row."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.proposers.autoregressive import NUM_NEWEST
from vllm_gaudi_spec.runner.batch import build_inputs

if TYPE_CHECKING:
    from vllm_gaudi_spec.attention.inputs import Inputs
    from vllm_gaudi_spec.proposers.base import Drafts
    from vllm_gaudi_spec.runner.batch import Batch
    from vllm_gaudi_spec.runner.requests import Request, Requests


class DrafterState:
    def __init__(self, requests: Requests, drafter_max_len: int) -> None:
        self._requests = requests
        self._longest = drafter_max_len
        self._reach_R = torch.zeros(requests.pad_row + 1, dtype=torch.int32, device=requests.backend.torch_device)
        """Positions up to here have the drafter's KV, as far as their drafts were accepted."""

    def admit(self, request: Request) -> None:
        """Blocks that it shares with others have their KV."""
        upload = self._requests.backend.upload
        self._put(upload(torch.tensor([request.row])), upload(torch.tensor([request.num_computed], dtype=torch.int32)))

    def chunk(self, batch: Batch) -> Inputs | None:
        """A prompt chunk, cut at the drafter's longest context."""
        if batch.shape.phase != "prefill":
            return None
        longest = self._longest
        if batch.requests and all(request.num_computed >= longest for request in batch.requests):
            return None
        starts_B = batch.starts_B.clamp(max=longest)
        num_real_B = torch.minimum(batch.num_real_B, longest - starts_B)
        starts_B = torch.where(num_real_B > 0, starts_B, 0)
        known = batch.single_row_real
        if known is not None:
            known = min(known, longest - batch.requests[0].num_computed)
        reach_B = self._reach_R.index_select(0, batch.rows_B)
        self._put(
            batch.rows_B, torch.where(reach_B >= starts_B, torch.maximum(reach_B, starts_B + num_real_B), reach_B)
        )
        return build_inputs(
            replace(batch, starts_B=starts_B, num_real_B=num_real_B, single_row_real=known), self._requests
        )

    def settle(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """Once behind each verdict: forget what was read of rejected drafts. bool [B]: rows of which the drafter has
        read all but the newest tokens."""
        # Beyond the newest token nothing counts that was written for drafts: they were rejected.
        reach_B = torch.minimum(self._reach_R.index_select(0, rows_B), lengths_B - 1)
        self._put(rows_B, reach_B)
        return reach_B >= lengths_B - NUM_NEWEST

    def drafted(self, rows_B: torch.Tensor, lengths_B: torch.Tensor, drafts: Drafts) -> None:
        reach_B = self._reach_R.index_select(0, rows_B)
        wrote_B = lengths_B + drafts.num_drafts_B - 1
        self._put(rows_B, torch.where(drafts.num_drafts_B > 0, wrote_B, reach_B))

    def _put(self, rows_B: torch.Tensor, reach_B: torch.Tensor) -> None:
        self._reach_R.index_copy_(0, rows_B, reach_B.int())

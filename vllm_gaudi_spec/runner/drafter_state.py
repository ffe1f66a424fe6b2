"""How far a drafter that is a model has read, row by row, and what it takes to catch up.

The device knows it exactly. The host knows a lower bound, since drafts may be in flight: enough to tell which rows have
to catch up, and in which shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_gaudi_spec.attention.inputs import rectangle
from vllm_gaudi_spec.proposers.autoregressive import NUM_NEWEST
from vllm_gaudi_spec.runner.batch import build_inputs

if TYPE_CHECKING:
    from vllm_gaudi_spec.attention.inputs import Inputs
    from vllm_gaudi_spec.proposers.base import Drafts
    from vllm_gaudi_spec.runner.batch import Batch, SampleBatch
    from vllm_gaudi_spec.runner.read_blocks import ReadBlocks
    from vllm_gaudi_spec.runner.requests import Request, Requests
    from vllm_gaudi_spec.runner.shapes import Shape, Shapes


@dataclass(slots=True)
class _Behind:
    """A row that has to catch up."""

    place: int
    """In the step's batch."""
    request: Request
    end: int = 0
    gap: int = 0
    """Up to so many tokens are unread."""


class DrafterState:
    def __init__(
        self, requests: Requests, shapes: Shapes, drafter_max_len: int, num_drafts: int, blocks: ReadBlocks
    ) -> None:
        self._requests = requests
        self._shapes = shapes
        self._longest = drafter_max_len
        self._num_drafts = num_drafts
        num_rows = requests.pad_row + 1
        self._reach_R = torch.zeros(num_rows, dtype=torch.int32, device=requests.backend.torch_device)
        """Positions up to here have the drafter's KV, as far as their drafts were accepted."""
        self._reach_np = np.zeros(num_rows, dtype=np.int32)
        """The host's lower bound."""
        self._keeps_up_np = np.zeros(num_rows, dtype=bool)
        """Rows of which the drafter has read all but the newest tokens, as far as the host knows."""
        self._arrived: set[int] = set()
        """Rows whose first forward is still to come."""
        self._blocks = blocks

    # --- what the host tells ---

    def apply(self) -> None:
        for request in self._requests.admitted:
            self._blocks.admit(request.row, request.num_computed)
            self._arrived.add(request.row)
        self._blocks.clear_new()

    def chunk(self, batch: Batch) -> Inputs | None:
        """What the drafter reads of a batch: a prompt chunk, cut at its longest context."""
        self._welcome(batch.requests)
        if batch.shape.phase != "prefill":
            return None
        longest = self._longest
        if batch.requests and all(request.num_computed >= longest for request in batch.requests):
            return None
        follows = [self._reach_np[request.row] >= request.num_computed for request in batch.requests]
        if batch.requests and not any(follows):
            return None
        for request, count, follow in zip(batch.requests, batch.counts, follows, strict=True):
            if follow:
                self._note(request.row, min(request.num_computed + count, longest))
        reach_B = self._reach_R.index_select(0, batch.rows_B)
        starts_B = batch.starts_B.clamp(max=longest)
        # A row with a gap before its chunk reads both when it catches up.
        num_real_B = torch.where(reach_B >= starts_B, torch.minimum(batch.num_real_B, longest - starts_B), 0)
        starts_B = torch.where(num_real_B > 0, starts_B, 0)
        known = batch.single_row_real
        if known is not None:
            known = min(known, longest - batch.requests[0].num_computed)
        self._put(batch.rows_B, torch.maximum(reach_B, starts_B + num_real_B))
        return build_inputs(
            replace(batch, starts_B=starts_B, num_real_B=num_real_B, single_row_real=known), self._requests
        )

    def _welcome(self, requests: list[Request]) -> None:
        """Not at admission: a row may share blocks that are written in this very step, by one that came before it."""
        rows = [request.row for request in requests if request.row in self._arrived]
        if not rows:
            return
        for request in requests:
            if request.row in self._arrived:
                reach = self._blocks.reach(request.row, request.num_computed)
                self._reach_np[request.row] = reach
                self._keeps_up_np[request.row] = reach == request.num_computed
        self._arrived.difference_update(rows)
        upload = self._requests.backend.upload
        self._put(upload(torch.tensor(rows)), upload(torch.from_numpy(self._reach_np[rows])))

    def _note(self, row: int, reach: int) -> None:
        if reach > self._reach_np[row]:
            self._blocks.note(row, int(self._reach_np[row]), reach)
            self._reach_np[row] = reach

    # --- behind a verdict ---

    def settle(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> None:
        """Once behind each verdict: beyond the newest token nothing counts that was written for drafts. They were
        rejected."""
        self._put(rows_B, torch.minimum(self._reach_R.index_select(0, rows_B), lengths_B - 1))

    def catch_up(
        self, batch: SampleBatch, lengths_B: torch.Tensor, able_np: np.ndarray
    ) -> Iterator[tuple[Shape, Inputs]]:
        """What the drafter has to read first, in the shapes of prompt chunks: of rows that may draft now and did not
        before. Rows that may not draft fall behind."""
        rows_np = batch.rows_np[: len(able_np)]
        behind = [
            _Behind(int(p), batch.requests[p]) for p in np.flatnonzero((able_np > 0) & ~self._keeps_up_np[rows_np])
        ]
        for row in behind:
            # All but the newest tokens, at most: those a row may have, whatever is in flight.
            request = row.request
            row.end = min(max(request.num_computed + 1 + self._num_drafts, len(request.known)), self._longest)
            row.gap = row.end - int(self._reach_np[request.row])
        while behind := [row for row in behind if row.gap > 0]:
            count = min(max(row.gap for row in behind), self._shapes.prefill_queries[-1])
            group = behind[: self._shapes.prefill_rows_at(count)]
            yield self._part(group, count, lengths_B)
            for row in group:
                row.gap -= count
        self._keeps_up_np[rows_np] = able_np > 0

    def _part(self, group: list[_Behind], count: int, lengths_B: torch.Tensor) -> tuple[Shape, Inputs]:
        shape = self._shapes.prefill(len(group), count, max(row.end for row in group) + count)
        small = np.zeros((2, shape.rows), dtype=np.int64)
        small[0], small[1] = self._requests.pad_row, len(lengths_B) - 1
        small[0, : len(group)] = [row.request.row for row in group]
        small[1, : len(group)] = [row.place for row in group]
        upload = self._requests.backend.upload
        rows_P, places_P = upload(torch.from_numpy(small)).unbind(0)
        starts_P = self._reach_R.index_select(0, rows_P)
        ends_P = (lengths_B.index_select(0, places_P) - 1).clamp(max=self._longest)
        is_real_P = rows_P != self._requests.pad_row
        num_real_P = torch.where(is_real_P, (ends_P - starts_P).clamp(min=0, max=count), 0).int()
        starts_P = torch.where(num_real_P > 0, starts_P, 0)
        self._put(rows_P, torch.maximum(self._reach_R.index_select(0, rows_P), starts_P + num_real_P))
        place_L = torch.arange(shape.queries, dtype=torch.int32, device=rows_P.device)
        tokens_PL = self._requests.tokens_at(rows_P, starts_P[:, None] + place_L)
        return shape, rectangle(tokens_PL, starts_P, num_real_P, self._requests.blocks(small[0], shape.context))

    def reads_all(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """bool [B]: rows of which the drafter has read all but the newest tokens."""
        return self._reach_R.index_select(0, rows_B) >= lengths_B - NUM_NEWEST

    def drafted(self, batch: SampleBatch, lengths_B: torch.Tensor, drafts: Drafts, able_np: np.ndarray) -> None:
        reach_B = self._reach_R.index_select(0, batch.rows_B)
        wrote_B = lengths_B + drafts.num_drafts_B - 1
        self._put(batch.rows_B, torch.where(drafts.num_drafts_B > 0, wrote_B, reach_B))
        for request, able in zip(batch.requests, able_np, strict=True):
            if able:
                self._note(request.row, min(request.num_computed - self._num_drafts, self._longest))

    def _put(self, rows_B: torch.Tensor, reach_B: torch.Tensor) -> None:
        self._reach_R.index_copy_(0, rows_B, reach_B.int())

"""The step's rectangles. A batch is made new each step and remembers nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_gaudi_spec.attention.inputs import Blocks, Inputs, rectangle

if TYPE_CHECKING:
    from vllm_gaudi_spec.runner.requests import Request, Requests
    from vllm_gaudi_spec.runner.shapes import Shape


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows of Q tokens; rows behind `requests` are padding."""

    shape: Shape
    requests: list[Request]
    finishes: list[bool]
    """Requests that sample in this step: all but those whose prompt goes on."""
    rows_np: np.ndarray
    rows_B: torch.Tensor
    """int64: the rows of `Requests`; padding has the pad row."""
    starts_B: torch.Tensor
    """int32: position of each row's first token."""
    num_real_B: torch.Tensor
    """int32: how many of the Q tokens are real."""
    counts: list[int]
    """What the host knows of `num_real_B`: exact for a prompt chunk, the most for a decode, whose drafts the device
    counts."""
    blocks: Blocks
    single_row_real: int | None = None
    """With one prompt chunk, its real length: known on the host."""

    def finishing(self) -> list[Request]:
        return [request for request, finishes in zip(self.requests, self.finishes, strict=True) if finishes]

    def continuing(self) -> list[Request]:
        return [request for request, finishes in zip(self.requests, self.finishes, strict=True) if not finishes]

    @property
    def num_sampled(self) -> int:
        """Positions at which a row of this batch may sample."""
        return self.shape.queries if self.shape.phase == "decode" else 1

    @property
    def longest(self) -> int:
        """The most tokens of a row, those of this batch included."""
        ends = (request.num_computed + count for request, count in zip(self.requests, self.counts, strict=True))
        return max(ends, default=0)

    def sampled_places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where tokens are sampled: flat places [B, Q] in the rectangle and their positions. All of a decode's tokens,
        a prompt chunk's last."""
        row_B = torch.arange(self.shape.rows, dtype=torch.int32, device=self.starts_B.device)
        if self.shape.phase == "decode":
            place_BQ = torch.arange(self.shape.queries, dtype=torch.int32, device=row_B.device).expand(
                self.shape.rows, -1
            )
        else:
            place_BQ = (self.num_real_B - 1).clamp(min=0)[:, None]
        return row_B[:, None] * self.shape.queries + place_BQ, self.starts_B[:, None] + place_BQ


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """The B rows of a step that sample, at Q positions each: one pass over all of them, whatever batch computed them.

    A row that comes from a prompt is a verify of zero drafts.
    """

    requests: list[Request]
    num_queries: int
    rows_np: np.ndarray
    rows_B: torch.Tensor
    """int64; padding has the pad row."""
    longest: int
    """No row knew more tokens than these when the step began, its drafts included."""


def build_inputs(batch: Batch, requests: Requests) -> Inputs:
    """Look up a batch's tokens on the device."""
    place_Q = torch.arange(batch.shape.queries, dtype=torch.int32, device=batch.starts_B.device)
    tokens_BQ = requests.tokens_at(batch.rows_B, batch.starts_B[:, None] + place_Q)
    return rectangle(tokens_BQ, batch.starts_B, batch.num_real_B, batch.blocks, batch.single_row_real)


def make_batch(
    requests: Requests,
    shape: Shape,
    members: list[Request],
    counts: list[int],
    finishes: list[bool],
    *,
    starts_known: bool,
) -> Batch:
    """Upload the host's part of a batch: which rows, how much of each, and their blocks.

    Prompt chunks start where the host says (`starts_known`); decodes start where the device's own count stands, and
    verify as many drafts as it has, up to what the host scheduled.
    """
    size = shape.rows
    rows_np = np.full(size, requests.pad_row, dtype=np.int64)
    rows_np[: len(members)] = [request.row for request in members]
    small = np.zeros((2, size), dtype=np.int32)
    small[0, : len(members)] = [request.num_computed for request in members]
    small[1, : len(members)] = counts
    upload = requests.backend.upload
    rows_B = upload(torch.from_numpy(rows_np))
    starts_B, num_real_B = upload(torch.from_numpy(small)).unbind(0)
    if not starts_known:
        starts_B = requests.computed_R.index_select(0, rows_B)
        num_real_B = torch.minimum(num_real_B, 1 + requests.num_drafts_R.index_select(0, rows_B))
    return Batch(
        shape=shape,
        requests=members,
        finishes=finishes,
        rows_np=rows_np,
        rows_B=rows_B,
        starts_B=starts_B,
        num_real_B=num_real_B,
        counts=counts,
        blocks=requests.blocks(rows_np, shape.context),
        single_row_real=counts[0] if starts_known and size == 1 and counts else None,
    )


def make_sample_batch(
    requests: Requests, num_rows: int, num_queries: int, members: list[Request], longest: int
) -> SampleBatch:
    rows_np = np.full(num_rows, requests.pad_row, dtype=np.int64)
    rows_np[: len(members)] = [request.row for request in members]
    return SampleBatch(members, num_queries, rows_np, requests.backend.upload(torch.from_numpy(rows_np)), longest)

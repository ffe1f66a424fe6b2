"""Batches padded to a shape, with their rows and KV blocks copied to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_gaudi_spec.records import DECODE, Batch, DraftBatch, Planned
from vllm_gaudi_spec.step_inputs import HostBlocks, StepInputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_gaudi_spec.records import Request, Shape
    from vllm_gaudi_spec.runner.requests import Requests


def pad_rows(requests: Requests, members: Sequence[Request], size: int) -> np.ndarray:
    """Return int32 [size]: the rows of `members`, padded with the pad row."""
    rows_np = np.full(size, requests.pad_row, dtype=np.int32)
    rows_np[: len(members)] = [request.row for request in members]
    return rows_np


def make_batch(requests: Requests, planned: Planned, max_drafts: int = 0, more: np.ndarray | None = None) -> Batch:
    """Copy the host's part of a batch to the device: rows, numbers of tokens, and KV blocks.

    Args:
        planned: The batch.
        max_drafts: For drafters on the device, the most drafts per row after this step.
        more: What a drafter on the host passes for each request.
    """
    shape, members, counts = planned.shape, planned.requests, planned.counts
    header_np = np.zeros((4, shape.rows), dtype=np.int32)
    header_np[0] = rows_np = pad_rows(requests, members, shape.rows)
    header_np[1, : len(members)] = planned.starts
    header_np[2, : len(members)] = counts
    header_np[3, : len(members)] = max_drafts
    if shape.phase == DECODE:
        blocks = requests.decode_blocks(rows_np, planned.ends, shape.context)
    else:
        blocks = requests.blocks(rows_np, planned.ends, shape.context, counts)
    more_np = None
    if more is not None:
        more_np = np.zeros((shape.rows, more.shape[1]), dtype=np.int32)
        more_np[: len(members)] = more
    return Batch(
        shape=shape,
        requests=members,
        starts=planned.starts,
        counts=counts,
        ends=planned.ends,
        finishes=planned.finishes,
        inputs=StepInputs.pack(header_np, blocks, requests.backend.memory.upload, more_np),
    )


def make_draft_batch(
    requests: Requests, members: list[Request], ends: list[int], max_drafts: int = 0, *, num_rows: int, context: int
) -> DraftBatch:
    """Copy rows to the device for a drafter.

    `max_drafts` is the most drafts per row. `context` is 0 for a drafter without KV; otherwise the blocks have room for
    `ends` tokens.
    """
    header_np = np.zeros((4, num_rows), dtype=np.int32)
    header_np[0] = rows_np = pad_rows(requests, members, num_rows)
    header_np[3, : len(members)] = max_drafts
    blocks = requests.decode_blocks(rows_np, ends, context) if context else HostBlocks()
    return DraftBatch(StepInputs.pack(header_np, blocks, requests.backend.memory.upload), context)


def make_padding(shape: Shape) -> Planned:
    """Return a batch without requests, for warm-up."""
    return Planned(shape=shape, requests=[], starts=[], counts=[], ends=[], finishes=[])

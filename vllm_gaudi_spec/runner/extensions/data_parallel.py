"""Lockstep for data-parallel ranks that share experts: they run each of the target's forward passes together.

Each rank schedules its own requests. However, experts are distributed across the ranks, which exchange tokens within a
forward pass. All ranks therefore need the same number of forward passes, with the same number of tokens in each. Before
a step computes anything, the ranks exchange their lists of rectangles and derive forward passes that fit every list. A
rank without work for a pass runs it on padding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from vllm_gaudi_spec.records import DECODE, PREFILL, Planned, Shape
from vllm_gaudi_spec.runner.extensions import Extension
from vllm_gaudi_spec.upstream.distributed import get_dp_group

if TYPE_CHECKING:
    from vllm_gaudi_spec.runner.shapes import Shapes


class Rectangle(NamedTuple):
    """A `Shape` without its context, which may differ between ranks."""

    decodes: int
    rows: int
    queries: int


class SharedForward(NamedTuple):
    """A forward pass that all ranks run together."""

    rectangle: Rectangle
    ranks: tuple[int, ...]
    """Ranks with real tokens in the forward pass."""


def merge_plans(plans: list[list[Rectangle]]) -> list[SharedForward]:
    """Return forward passes that fit every rank's plan.

    Each plan's order is preserved, because a later batch may read what an earlier one wrote. All ranks have all plans,
    so they compute the same result.
    """
    cursors, steps = [0] * len(plans), list[SharedForward]()
    while True:
        next_rectangles = {
            rank: plan[cursor] for rank, (plan, cursor) in enumerate(zip(plans, cursors, strict=True)) if plan[cursor:]
        }
        if not next_rectangles:
            return steps
        # Decodes run first, because plans begin with them.
        decodes = max(one.decodes for one in next_rectangles.values())
        members = {rank: one for rank, one in next_rectangles.items() if one.decodes == decodes}
        rows, queries = (max(getattr(one, name) for one in members.values()) for name in ("rows", "queries"))
        steps.append(SharedForward(Rectangle(decodes, rows, queries), tuple(members)))
        for rank in members:
            cursors[rank] += 1


class DataParallelLockstep(Extension):
    """Fits this rank's batches to those of the other ranks."""

    def __init__(self, shapes: Shapes, max_forwards: int) -> None:
        """Create the extension. `max_forwards` is the maximum number of forward passes in a step."""
        self._shapes = shapes
        self._max_forwards = max_forwards

    def fit(self, planned: list[Planned]) -> list[Planned]:
        """Return the batches that this rank runs, some of which may be padding. This is a collective operation."""
        plan = [Rectangle(int(b.shape.phase == DECODE), b.shape.rows, b.shape.queries) for b in planned]
        rank, waiting = get_dp_group().rank_in_group, iter(planned)
        return [
            self._widen(next(waiting) if rank in ranks else None, rectangle)
            for rectangle, ranks in merge_plans(self._exchange(plan))
        ]

    def _exchange(self, plan: list[Rectangle]) -> list[list[Rectangle]]:
        """Return every rank's plan. The hosts exchange the plans without waiting for a device."""
        group = get_dp_group()
        plan_F3 = torch.zeros(self._max_forwards, len(Rectangle._fields), dtype=torch.int32)
        if plan:
            plan_F3[: len(plan)] = torch.tensor(plan, dtype=torch.int32)
        plans = [torch.empty_like(plan_F3) for _ in range(group.world_size)]
        dist.all_gather(plans, plan_F3, group=group.cpu_group)
        return [[Rectangle(*row) for row in each.tolist() if row[1]] for each in plans]

    def _widen(self, batch: Planned | None, rectangle: Rectangle) -> Planned:
        """Widen the batch, or padding if there is none, to `rectangle`, which is as large as any rank needs."""
        if batch is not None and (batch.shape.rows, batch.shape.queries) == rectangle[1:]:
            return batch
        if batch is None:
            batch = Planned(shape=Shape("", 0, 0, 0), requests=[], starts=[], counts=[], ends=[], finishes=[])
        rows, queries = rectangle.rows, rectangle.queries
        if rectangle.decodes:
            # Another rank may have drafts in this step even if this rank has none.
            longest = [
                max(end, request.num_computed + queries)
                for request, end in zip(batch.requests, batch.ends, strict=True)
            ]
            batch = replace(batch, ends=longest)
            shape = self._shapes.decode(queries, longest, rows)
        else:
            start, end = (max(positions, default=0) for positions in (batch.starts, batch.ends))
            shape = self._shapes.prefill(rows, queries, end, start=start)
        assert (shape.phase, shape.rows, shape.queries) == (DECODE if rectangle.decodes else PREFILL, rows, queries)
        return replace(batch, shape=shape)

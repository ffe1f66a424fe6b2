"""Lockstep for data-parallel ranks that share experts, which run each forward pass of the target together.

Each rank schedules its own requests. However, experts are distributed across ranks, which exchange tokens during a
forward pass. All ranks therefore need the same number of forward passes with the same numbers of tokens. At the start
of a step, the ranks exchange the shapes of their batches and derive forward passes that fit all of them. A rank that
has no batch for a forward pass runs it on padding.
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
    """A `Shape` without a context, which may differ between ranks."""

    decodes: int
    rows: int
    queries: int


class SharedForward(NamedTuple):
    """A forward pass that all ranks run together."""

    rectangle: Rectangle
    ranks: tuple[int, ...]
    """Ranks that have real tokens in the forward pass."""


def merge_plans(plans: list[list[Rectangle]]) -> list[SharedForward]:
    """Return forward passes that fit the plans of all ranks.

    The order of each plan is preserved, because a later batch may read what an earlier one has written. Every rank has
    all plans, so all ranks compute the same result.
    """
    cursors, steps = [0] * len(plans), list[SharedForward]()
    while True:
        next_rectangles = {
            rank: plan[cursor] for rank, (plan, cursor) in enumerate(zip(plans, cursors, strict=True)) if plan[cursor:]
        }
        if not next_rectangles:
            return steps
        # Decodes run first, because every plan begins with its decodes.
        decodes = max(one.decodes for one in next_rectangles.values())
        members = {rank: one for rank, one in next_rectangles.items() if one.decodes == decodes}
        rows, queries = (max(getattr(one, name) for one in members.values()) for name in ("rows", "queries"))
        steps.append(SharedForward(Rectangle(decodes, rows, queries), tuple(members)))
        for rank in members:
            cursors[rank] += 1


class DataParallelLockstep(Extension):
    """Makes the shapes of this rank's batches equal to those of other ranks."""

    def __init__(self, shapes: Shapes, max_forwards: int) -> None:
        """Create the extension. `max_forwards` is the maximum number of forward passes in a step."""
        self._shapes = shapes
        self._max_forwards = max_forwards

    def fit(self, planned: list[Planned]) -> list[Planned]:
        """Return the batches that this rank runs, which may include padding. This method is a collective operation."""
        plan = [Rectangle(int(b.shape.phase == DECODE), b.shape.rows, b.shape.queries) for b in planned]
        rank, waiting = get_dp_group().rank_in_group, iter(planned)
        return [
            self._widen(next(waiting) if rank in ranks else None, rectangle)
            for rectangle, ranks in merge_plans(self._exchange(plan))
        ]

    def _exchange(self, plan: list[Rectangle]) -> list[list[Rectangle]]:
        """Return every rank's plan. The hosts exchange plans without waiting for a device."""
        group = get_dp_group()
        plan_F3 = torch.zeros(self._max_forwards, len(Rectangle._fields), dtype=torch.int32)
        if plan:
            plan_F3[: len(plan)] = torch.tensor(plan, dtype=torch.int32)
        plans = [torch.empty_like(plan_F3) for _ in range(group.world_size)]
        dist.all_gather(plans, plan_F3, group=group.cpu_group)
        return [[Rectangle(*row) for row in each.tolist() if row[1]] for each in plans]

    def _widen(self, batch: Planned | None, rectangle: Rectangle) -> Planned:
        """Pad the batch, or an empty batch if there is none, to the shape `rectangle`, large enough for every rank."""
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

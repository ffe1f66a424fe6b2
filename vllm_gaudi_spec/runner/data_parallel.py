"""Data-parallel ranks that have experts in common, and so run every forward of the target together.

Each rank schedules requests of its own, and what it has to compute is another matter on each. But experts are spread
over the ranks: within a forward the ranks exchange tokens, so there have to be as many forwards on each of them, of as
many tokens each. Before a step computes anything the ranks tell each other which rectangles they have, and all of them
run those that serve everybody. A rank that has nothing to compute in one of them runs it on padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from vllm.distributed import get_dp_group

from vllm_gaudi_spec.records import DECODE, PREFILL, Planned

if TYPE_CHECKING:
    from vllm_gaudi_spec.runner.shapes import Shapes


class Rectangle(NamedTuple):
    """A `Shape` without the context, which is each rank's own affair."""

    decodes: int
    rows: int
    queries: int


class SharedForward(NamedTuple):
    """A forward that all ranks run."""

    rectangle: Rectangle
    ranks: tuple[int, ...]
    """Those with something to compute in it."""


def merged(plans: list[list[Rectangle]]) -> list[SharedForward]:
    """The forwards that serve every rank's plan, each plan in its own order: one that comes later may read what one
    before it wrote. The same on all ranks, since all know all plans."""
    places, steps = [0] * len(plans), list[SharedForward]()
    while True:
        next_ones = {
            rank: plan[place] for rank, (plan, place) in enumerate(zip(plans, places, strict=True)) if plan[place:]
        }
        if not next_ones:
            return steps
        # Decodes first: plans begin with them.
        decodes = max(one.decodes for one in next_ones.values())
        takers = {rank: one for rank, one in next_ones.items() if one.decodes == decodes}
        rows, queries = (max(getattr(one, name) for one in takers.values()) for name in ("rows", "queries"))
        steps.append(SharedForward(Rectangle(decodes, rows, queries), tuple(takers)))
        for rank in takers:
            places[rank] += 1


class DataParallelLockstep:
    """Fits the batches of one rank's step to those of the other ranks."""

    def __init__(self, shapes: Shapes, max_forwards: int) -> None:
        """`max_forwards`: of a step."""
        self._shapes = shapes
        self._max_forwards = max_forwards

    def fit(self, batches: list[Planned]) -> list[Planned]:
        """What this rank runs in this step, some of it on padding. A collective."""
        own = [Rectangle(int(b.shape.phase == DECODE), b.shape.rows, b.shape.queries) for b in batches]
        rank, waiting = get_dp_group().rank_in_group, iter(batches)
        return [
            self._widened(next(waiting) if rank in ranks else None, rectangle)
            for rectangle, ranks in merged(self._exchange(own))
        ]

    def _exchange(self, own: list[Rectangle]) -> list[list[Rectangle]]:
        """Every rank's plan, through the hosts: nothing waits for a device."""
        group = get_dp_group()
        mine = torch.zeros(self._max_forwards, len(Rectangle._fields), dtype=torch.int32)
        if own:
            mine[: len(own)] = torch.tensor(own, dtype=torch.int32)
        plans = [torch.empty_like(mine) for _ in range(group.world_size)]
        dist.all_gather(plans, mine, group=group.cpu_group)
        return [[Rectangle(*row) for row in plan.tolist() if row[1]] for plan in plans]

    def _widened(self, batch: Planned | None, rectangle: Rectangle) -> Planned:
        """The batch, or padding, in a rectangle that is as large as the largest of all ranks."""
        if batch is not None and (batch.shape.rows, batch.shape.queries) == rectangle[1:]:
            return batch
        members, counts, finishes = ([], [], []) if batch is None else (batch.requests, batch.counts, batch.finishes)
        starts = [request.num_computed for request in members]
        rows, queries = rectangle.rows, rectangle.queries
        if rectangle.decodes:
            shape = self._shapes.decode(queries, [start + queries for start in starts], rows)
        else:
            longest = max(counts, default=queries)
            end = max(starts, default=0) + longest
            shape = self._shapes.prefill(rows, queries, end + queries - longest)
        assert (shape.phase, shape.rows, shape.queries) == (DECODE if rectangle.decodes else PREFILL, rows, queries)
        return Planned(shape=shape, requests=members, counts=counts, finishes=finishes)

"""The closed list of shapes of sampling passes, and the smallest that fits.

Where each shape and branch is compiled, a pass lists the positions that sample, whatever rows they belong to: a verify
step of few rows and a plain step of many are one graph, and a row without drafts has one position in either. Elsewhere,
and where an acceptance rule reads the positions of a row together, a pass is a rectangle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

from vllm_gaudi_spec.records import SampleShape
from vllm_gaudi_spec.runner.shapes import fit

if TYPE_CHECKING:
    from vllm_gaudi_spec.runner.shapes import Shapes
    from vllm_gaudi_spec.sampling.params import Branch

_SMALLEST = 16
"""Fewer positions cost about as much: reading the weights of the output layer takes longer than computing with them."""


class SampleShapes:
    def __init__(
        self, shapes: Shapes, *, max_rows: int, lists: bool, needs_rectangle: Callable[[Branch], bool]
    ) -> None:
        """`lists`: whether passes list positions. `needs_rectangle`: whether a verify step of a branch does not."""
        self._lists = lists
        self._needs_rectangle = needs_rectangle
        self._max_rows = max_rows
        self._max_queries = shapes.decode_queries[-1]
        self._queries = shapes.decode_queries
        self._rows, self._fit_rows = shapes.decode_rows, shapes.fit_rows
        self._usual = _halved(max_rows * self._max_queries, _SMALLEST)
        self._rare = tuple(reversed(self._usual[::-2]))
        """Every second, for branches that few requests need."""

    def fit(self, num_queries: int, num_positions: Sequence[int], branch: Branch) -> SampleShape:
        """For a step whose requests have up to `num_queries` positions each: each has `num_positions`."""
        if self._is_rectangle(num_queries, branch):
            return SampleShape(self._fit_rows(len(num_positions)), num_queries)
        return self._listed(fit(self._sizes(branch), sum(num_positions)))

    def every(self, branches: Iterable[Branch]) -> Iterator[tuple[SampleShape, Branch]]:
        """All that `fit` can return, the largest of each branch first."""
        for branch in branches:
            if self._lists:
                for size in reversed(self._sizes(branch)):
                    yield self._listed(size), branch
            for rows, queries in product(reversed(self._rows), reversed(self._queries)):
                if self._is_rectangle(queries, branch):
                    yield SampleShape(rows, queries), branch

    def _is_rectangle(self, num_queries: int, branch: Branch) -> bool:
        return not self._lists or (num_queries > 1 and self._needs_rectangle(branch))

    def _sizes(self, branch: Branch) -> tuple[int, ...]:
        sizes = self._rare if branch.is_full else self._usual
        if not self._needs_rectangle(branch):
            return sizes
        # Only plain steps: a position a row.
        return tuple(size for size in sizes if size <= fit(sizes, self._max_rows))

    def _listed(self, num_positions: int) -> SampleShape:
        return SampleShape(min(num_positions, self._max_rows), self._max_queries, num_positions)


def _halved(largest: int, smallest: int) -> tuple[int, ...]:
    """From `largest` down to at least `smallest`: a full bucket of rows with drafts fits exactly."""
    sizes = [largest]
    while sizes[-1] >= 2 * smallest:
        sizes.append(-(-sizes[-1] // 2))
    return tuple(reversed(sizes))

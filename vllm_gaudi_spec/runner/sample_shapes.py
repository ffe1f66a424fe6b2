"""The closed list of shapes of sampling passes.

Where each shape and branch is compiled, a pass lists the positions that sample, whichever rows they belong to. So a
verification of few rows and a plain step of many rows share a graph, and a row without drafts has one position in both.
Elsewhere, and where an acceptance rule reads the positions of a row together, a pass is a rectangle.
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
"""Fewer positions cost about as much, since reading the output layer's weights takes longer than the computation."""
_NUM_LISTED, _NUM_RECTANGLES = 7, 5
"""Most sizes of a branch, so that a configuration has at most 40 of these graphs."""


class SampleShapes:
    def __init__(
        self, shapes: Shapes, *, max_rows: int, lists: bool, needs_rectangle: Callable[[Branch], bool]
    ) -> None:
        """`lists`: whether passes list positions. `needs_rectangle`: whether the verification of a branch does not."""
        self._lists = lists
        self._needs_rectangle = needs_rectangle
        self._max_rows = max_rows
        self._max_queries = shapes.decode_queries[-1]
        self._queries = shapes.decode_queries
        self._rows, self._fit_rows = shapes.decode_rows, shapes.fit_rows
        self._rectangles = _halve(max_rows, 1)[-_NUM_RECTANGLES:]
        self._cold = shapes.cold
        self._usual = _halve(max_rows * self._max_queries, _SMALLEST)[-_NUM_LISTED:]

    def fit(self, num_queries: int, num_positions: Sequence[int], branch: Branch) -> SampleShape:
        """Return the shape of a step whose requests have `num_positions` positions each, at most `num_queries`."""
        if self._is_rectangle(num_queries, branch):
            num_rows = len(num_positions)
            rows = fit(_thin_out(self._rectangles, branch), num_rows) if self._lists else self._fit_rows(num_rows)
            shape = SampleShape(rows, num_queries)
        else:
            shape = self._list_positions(fit(self._sizes(branch), sum(num_positions)))
        if (shape, branch) not in self._cold:
            return shape
        every = (one for one in self.every([branch]) if one not in self._cold and holds(one, (shape, branch)))
        return min(every)[0]

    def every(self, branches: Iterable[Branch]) -> Iterator[tuple[SampleShape, Branch]]:
        """Yield every shape and branch that `fit` can return, the largest shape of each branch first."""
        for branch in branches:
            if self._lists:
                for size in reversed(self._sizes(branch)):
                    yield self._list_positions(size), branch
            all_rows = _thin_out(self._rectangles, branch) if self._lists else self._rows
            for rows, queries in product(reversed(all_rows), reversed(self._queries)):
                if self._is_rectangle(queries, branch):
                    yield SampleShape(rows, queries), branch

    def _is_rectangle(self, num_queries: int, branch: Branch) -> bool:
        return not self._lists or (num_queries > 1 and self._needs_rectangle(branch))

    def _sizes(self, branch: Branch) -> tuple[int, ...]:
        if not self._needs_rectangle(branch):
            return _thin_out(self._usual, branch)
        # Only plain steps, with one position per row. Verify steps have as many graphs again.
        plain = tuple(size for size in self._usual if size <= fit(self._usual, self._max_rows))
        return _thin_out(plain, branch, at_least=2)

    def _list_positions(self, num_positions: int) -> SampleShape:
        return SampleShape(min(num_positions, self._max_rows), self._max_queries, num_positions)


def _thin_out(sizes: tuple[int, ...], branch: Branch, at_least: int = 1) -> tuple[int, ...]:
    """Return every second or fourth size for branches that few requests need, and every `at_least`-th for all."""
    step = 4 if branch.is_rarest else 2 if branch.is_full else 1
    return sizes[:: -max(step, at_least)][::-1]


def holds(large: tuple[SampleShape, Branch], small: tuple[SampleShape, Branch]) -> bool:
    """Whether a pass can be padded to another one: of the same branch, with more positions or rows."""
    (of_large, branch), (of_small, same) = large, small
    alike = branch == same and of_large.queries == of_small.queries
    return alike and bool(of_large.positions) == bool(of_small.positions) and of_large >= of_small


def _halve(largest: int, smallest: int) -> tuple[int, ...]:
    """Return sizes from `largest` down to at least `smallest`, so that a full bucket of rows with drafts fits
    exactly."""
    sizes = [largest]
    while sizes[-1] >= 2 * smallest:
        sizes.append(-(-sizes[-1] // 2))
    return tuple(reversed(sizes))

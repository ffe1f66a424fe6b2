"""Adaptive k: chooses each request's number of drafts by its acceptance rate."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

_FORGET = 0.9
"""The factor by which a step reduces the weight of the steps before it."""
_PRIOR = 2.0
"""The weight, in drafts, of all requests' acceptance rate in the estimate for one request."""
_LEAST_CHANCE = 0.05
"""A position is drafted if it and all positions before it are accepted with at least this probability."""
_LITTLE = 0.1
"""The minimum of expected accepted drafts per row, averaged over the batch, for the batch to draft at all."""
_TRY_AGAIN = 32
"""The number of steps after which requests without drafts try one draft again."""


@dataclass(slots=True)
class _Count:
    accepted: float = 0.0
    rejected: float = 0.0

    def add(self, accepted: int, rejected: bool, keep: float) -> None:
        self.accepted = self.accepted * keep + accepted
        self.rejected = self.rejected * keep + rejected

    def rate(self, prior: float) -> float:
        return (self.accepted + _PRIOR * prior) / (self.accepted + self.rejected + _PRIOR)


class Lengths:
    """Tracks acceptance and chooses the number of drafts."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._by_id: dict[str, _Count] = {}
        self._all = _Count()
        self._steps = 0

    def observe(self, req_id: str, num_drafted: int, num_accepted: int) -> None:
        """Record how many of a request's drafts were accepted. Those after the first rejected draft tell nothing."""
        rejected = num_accepted < num_drafted
        self._by_id.setdefault(req_id, _Count()).add(num_accepted, rejected, _FORGET)
        # The rate of all requests has a longer memory, as it is the estimate for new requests.
        self._all.add(num_accepted, rejected, 1 - (1 - _FORGET) / 16)

    def forget(self, req_ids: Collection[str]) -> None:
        for req_id in req_ids:
            self._by_id.pop(req_id, None)

    def choose(self, req_ids: Collection[str]) -> dict[str, int]:
        """Return each request's maximum number of drafts after the step that is being scheduled."""
        self._steps += 1
        prior = self._all.rate(0.5)
        rates = {req_id: self._by_id.get(req_id, _Count()).rate(prior) for req_id in req_ids}
        lengths = {req_id: self._num_worth_drafting(rate) for req_id, rate in rates.items()}
        gain = sum(_expected_accepted(rates[req_id], length) for req_id, length in lengths.items())
        if gain < _LITTLE * len(lengths):
            lengths = dict.fromkeys(lengths, 0)
        if self._steps % _TRY_AGAIN == 0:
            lengths = {req_id: max(length, 1) for req_id, length in lengths.items()}
        return lengths

    def _num_worth_drafting(self, rate: float) -> int:
        if rate >= 1:
            return self._num_drafts
        return min(self._num_drafts, int(math.log(_LEAST_CHANCE) / math.log(rate)))


def _expected_accepted(rate: float, length: int) -> float:
    """Return the expected number of accepted drafts out of `length`."""
    return rate * (1 - rate**length) / (1 - rate) if rate < 1 else length

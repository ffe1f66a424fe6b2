"""Adaptive verification: choose how many drafts per row the next step verifies, by expected tokens per second.

All rows of a step share one shape, so the number of drafts per row is the batch's token budget. The choice depends on
measured times and on the acceptance of earlier drafts, never on drafts that are still to be verified or on the noise
that will verify them. Therefore every acceptance rule stays exact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

_FORGET = 0.95
"""The factor by which an observation of a request reduces the weight of those before it."""
_FORGET_IDLE = 0.98
"""The same for a step without drafts: the estimate slowly returns to that of a new request, which is tried again."""
_FORGET_ALL = 0.998
"""The same for the acceptance rates of all requests."""
_PRIOR = 6.0
"""The weight, in drafts, of all requests' acceptance rate in the estimate for one request."""
_LOWEST_RATE = 0.05
"""A lower bound of the acceptance rate of all requests, so that drafts of a new request always have a chance."""


@dataclass(slots=True)
class _Count:
    accepted: float = 0.0
    expected: float = 0.0
    """The number of drafts tried; for a position, the number that the requests' own rates predict."""

    def add(self, accepted: float, expected: float, keep: float) -> None:
        self.accepted = self.accepted * keep + accepted
        self.expected = self.expected * keep + expected

    def rate(self, prior: float) -> float:
        return (self.accepted + _PRIOR * prior) / (self.expected + _PRIOR)


class Acceptance:
    """Estimator of how many drafts of each request will be accepted."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._by_id: dict[str, _Count] = {}
        self._all = _Count()
        self._positions = [_Count() for _ in range(num_drafts)]
        """Accepted drafts by position, and the number that the requests' own rates predict there."""

    def observe(self, req_id: str, num_drafted: int, num_accepted: int) -> None:
        """Record how many of a request's drafts were accepted. Those after the first rejected draft tell nothing."""
        num_tried = min(num_accepted + 1, max(num_drafted, 1))
        count = self._by_id.setdefault(req_id, _Count())
        rate = count.rate(self._average())
        count.add(num_accepted, num_tried, _FORGET)
        if not num_drafted:  # says something of this request alone
            return
        for position in range(num_tried):
            self._positions[position].add(position < num_accepted, rate, _FORGET_ALL)
        self._all.add(num_accepted, num_tried, _FORGET_ALL)

    def observe_idle(self, req_ids: Collection[str]) -> None:
        """Record a step without drafts."""
        for req_id in req_ids:
            if (count := self._by_id.get(req_id)) is not None:
                count.add(0, 0, _FORGET_IDLE)
        self._all.add(0, 0, _FORGET_ALL)

    def forget(self, req_ids: Collection[str]) -> None:
        for req_id in req_ids:
            self._by_id.pop(req_id, None)

    def _average(self) -> float:
        return max(self._all.rate(1.0), _LOWEST_RATE)  # until drafts are rejected, they are worth a try

    def expect_tokens(self, max_drafts_by_id: dict[str, int]) -> np.ndarray:
        """Return the expected number of tokens of a step that verifies 0, 1, ..., k drafts per row.

        Args:
            max_drafts_by_id: The requests of the step, and the number of drafts that each may have at most.
        """
        average = self._average()
        profile_K = np.array([count.rate(1.0) for count in self._positions])
        new = _Count()
        rates_B = [self._by_id.get(req_id, new).rate(average) for req_id in max_drafts_by_id]
        chances_BK = np.minimum(np.array(rates_B)[:, None] * profile_K, 1.0)
        is_allowed_BK = np.arange(self._num_drafts) < np.array([*max_drafts_by_id.values()])[:, None]
        accepted_K = np.where(is_allowed_BK, chances_BK, 0.0).cumprod(1).sum(0).cumsum()
        return len(max_drafts_by_id) + np.concatenate(([0.0], accepted_K))


_OWN_STEPS = 4
"""The number of steps in a row whose times say something of their choice alone. Later changes are those of all."""
_OWN_SMOOTHING = 1 / 2
"""The weight of one of these steps in the mean of its choice."""
_SMOOTHING = 1 / 8
"""The weight of a later step."""
_LARGEST_CHANGE = 1.5
"""The factor by which one step's time may exceed the mean: a longer step is a pause."""
_DOUBT = 1 / 4096
"""The share by which a step shortens the times of all other choices, so that each of them runs again after a while: its
time may have been measured while something else kept the machine busy."""
_WORTH_A_CHANGE = 1.02
"""The speedup for which the choice changes."""
_UNKNOWN = 1e-6
"""Seconds of a step that warm-up did not measure: short, so that each choice runs and is measured."""


@dataclass(slots=True)
class _Size:
    """The state of one batch size. J is the number of choices."""

    seconds_J: np.ndarray
    """Estimated seconds of a step; at first those of warm-up."""
    chosen: int = -1
    """The index of the most recent choice."""
    measured: int = -1
    """The index of the choice that was measured last."""
    num_measured: int = 0
    """The number of steps that measured it in a row."""
    first: float = 0.0
    """Seconds of the first step of a choice that is not known."""
    is_known_J: np.ndarray = field(init=False)
    """Whether steps corrected the choice's time of warm-up."""

    def __post_init__(self) -> None:
        self.is_known_J = np.zeros(len(self.seconds_J), dtype=bool)


class StepTimes:
    """Times of steps by batch size and number of drafts, and the choice of the number of drafts.

    Warm-up measures all of them without waiting for the host and on short contexts, so most of its times are too short.
    A choice that looks too fast is corrected as soon as it runs, and the others look faster with every step in which
    they do not run. Later changes of a choice's time are taken as changes of all, since contexts and load have changed.
    """

    def __init__(self, sizes: Sequence[int], choices: Sequence[int]) -> None:
        """Start without measurements.

        Args:
            sizes: Batch sizes that steps are padded to. choices: Numbers of drafts that have decode shapes of their
            own, in ascending order, starting with 0.
        """
        self._buckets = sizes
        self._choices = choices
        self._sizes: dict[int, _Size] = {}
        self._warmed: Mapping[int, Sequence[float]] = {}

    def start_from(self, warmed: Mapping[int, Sequence[float]]) -> None:
        """Start from the times of warm-up, which come with the first step's output and again with each later one.

        Args:
            warmed: Maps a batch size to the seconds of a step for each choice.
        """
        if warmed and not self._warmed:
            self._warmed, self._sizes = warmed, {}

    def choose(self, num_rows: int, tokens_J: np.ndarray, *, limit: int | None = None) -> int:
        """Return the number of drafts with the most expected tokens per second.

        Args:
            num_rows: Number of rows of the step.
            tokens_J: Expected number of tokens of the step for 0, 1, ... drafts per row.
            limit: The largest number that may be chosen. Default: the last of the choices.
        """
        size = self._at(num_rows)
        choices = [num for num in self._choices if limit is None or num <= limit]
        speeds = tokens_J[choices] / size.seconds_J[: len(choices)]
        best = int(speeds.argmax())
        if not 0 <= size.chosen < len(choices) or speeds[best] > _WORTH_A_CHANGE * speeds[size.chosen]:
            size.chosen = best
        return choices[size.chosen]

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Record a decode step. The steps before and after it had the same size and number of drafts.

        Args:
            num_rows: Number of rows of the step.
            num_drafts: The number of drafts per row that were chosen for the step to verify.
            seconds: The time since the step before it ended.
        """
        size, index = self._at(num_rows), self._choices.index(num_drafts)
        size.num_measured = size.num_measured + 1 if index == size.measured else 1
        size.measured = index
        expected = size.seconds_J[index]
        change = min(seconds, _LARGEST_CHANGE * expected) - expected
        if not size.is_known_J[index]:
            if size.num_measured == 1:
                size.first = seconds
            else:
                seconds = min(size.first, seconds)  # either may have been a pause
                if not size.is_known_J.any():
                    size.seconds_J = size.seconds_J * min(seconds / expected, 1)
                size.seconds_J[index], size.is_known_J[index] = seconds, True
        elif size.num_measured <= _OWN_STEPS:
            size.seconds_J[index] += _OWN_SMOOTHING * change
        else:
            size.seconds_J += _SMOOTHING * change
        shortened_J = size.seconds_J * (1 - _DOUBT)
        shortened_J[index] = size.seconds_J[index]
        size.seconds_J = np.maximum(shortened_J, size.seconds_J[index] / 100)

    def fit(self, num_rows: int) -> int:
        """Return the batch size that a step of `num_rows` rows is padded to."""
        return self._buckets[min(bisect_left(self._buckets, num_rows), len(self._buckets) - 1)]

    def _at(self, num_rows: int) -> _Size:
        bucket = self.fit(num_rows)
        if bucket not in self._sizes:
            warmed = self._warmed.get(bucket, [_UNKNOWN] * len(self._choices))
            self._sizes[bucket] = _Size(np.array(warmed, dtype=float))
        return self._sizes[bucket]

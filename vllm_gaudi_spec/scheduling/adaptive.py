"""Adaptive verification, which chooses the number of drafts per row that maximizes the expected tokens per second.

All rows in a step have the same shape, so the number of drafts per row determines the size of the batch. The choice
depends on measured times, on the acceptance of earlier drafts and on the lengths of requests, but never on drafts that
await verification or on the noise used to verify them. Every acceptance rule therefore remains exact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

_FORGET = 0.95
"""Factor by which each new observation of a request reduces the weight of earlier observations."""
_FORGET_IDLE = 0.98
"""Replaces `_FORGET` in a step without drafts. The estimate slowly reverts to the average, so drafting is retried."""
_FORGET_ALL = 0.998
"""Replaces `_FORGET` in the overall acceptance rate."""
_PRIOR = 6.0
"""Weight of the overall acceptance rate in the estimate for a request, as a number of drafts."""
_LOWEST_RATE = 0.05
"""Lower bound on the overall acceptance rate, so that new requests always have a chance to draft."""


@dataclass(slots=True)
class _Count:
    accepted: float = 0.0
    expected: float = 0.0
    """Number of drafts tried or, for a draft position, the acceptances predicted from the requests' own rates."""

    def add(self, accepted: float, expected: float, keep: float) -> None:
        self.accepted = self.accepted * keep + accepted
        self.expected = self.expected * keep + expected

    def rate(self, prior: float) -> float:
        return (self.accepted + _PRIOR * prior) / (self.expected + _PRIOR)


class Acceptance:
    """Estimates how many drafts of each request will be accepted."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._by_id: dict[str, _Count] = {}
        self._all = _Count()
        self._positions = [_Count() for _ in range(num_drafts)]
        """Number of accepted drafts at each position, and the number predicted from the requests' own rates."""

    def observe(self, req_id: str, num_drafted: int, num_accepted: int) -> None:
        """Record how many drafts of a request were accepted. Drafts after the first rejected one are ignored."""
        num_tried = min(num_accepted + 1, max(num_drafted, 1))
        count = self._by_id.setdefault(req_id, _Count())
        rate = count.rate(self._average())
        count.add(num_accepted, num_tried, _FORGET)
        if not num_drafted:  # this provides no information about other requests
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
        return max(self._all.rate(1.0), _LOWEST_RATE)  # drafts are worth trying until some are rejected

    def expect_tokens(self, max_drafts_by_id: dict[str, int]) -> np.ndarray:
        """Return the expected number of tokens from a step that verifies 0, 1, ..., k drafts per row.

        Args:
            max_drafts_by_id: Maps each request in the step to its maximum number of drafts.
        """
        average = self._average()
        profile_K = np.array([count.rate(1.0) for count in self._positions])
        new = _Count()
        rates_B = [self._by_id.get(req_id, new).rate(average) for req_id in max_drafts_by_id]
        chances_BK = np.minimum(np.array(rates_B)[:, None] * profile_K, 1.0)
        is_allowed_BK = np.arange(self._num_drafts) < np.array([*max_drafts_by_id.values()])[:, None]
        accepted_K = np.where(is_allowed_BK, chances_BK, 0.0).cumprod(1).sum(0).cumsum()
        return len(max_drafts_by_id) + np.concatenate(([0.0], accepted_K))


_LONGEST_MEMORY = 32
"""Maximum number of steps included in the running mean of a choice."""
_LARGEST_CHANGE = 1.5
"""Maximum ratio between a step and the mean, in either direction. A longer step probably includes a pause."""
_LARGE_CHANGES = 4
"""Number of consecutive steps outside `_LARGEST_CHANGE` after which all choices are measured again."""
_LARGEST_DRIFT = 0.1
"""Maximum relative change that is also applied to other choices. Noise must not make other choices look slow."""
_OPTIMISM = 0.5
"""Number of standard errors to subtract from each mean, so that a few slow steps do not rule out a choice."""
_FIRST_VARIANCE = 0.04
"""Assumed relative variance of step times before any have been measured."""
_VARIANCE_SMOOTHING = 1 / 16
"""Weight of each step in the running variance."""
_DOUBT = 1 / 3072
"""Fraction by which each step shortens the estimates for all other choices, divided by the number of steps in their
means. As a result, every choice is eventually tried again, in case the machine was busy when the choice was
measured."""
_FORGET_STEPS = 1 / 1024
"""Fraction by which each step reduces the weight, in steps, of the means of all other choices."""
_OUT_OF_DATE = 0.5
"""Number of steps in a mean below which the choice must be measured again."""
_WORTH_A_CHANGE = 1.02
"""Minimum expected speedup at which the choice is changed."""
_UNKNOWN = 1e-6
"""Assumed seconds per step for choices that warm-up did not measure, short enough for each of them to be tried."""


@dataclass(slots=True)
class _Size:
    """The state for one batch size. J is the number of choices."""

    rows: int
    warmed_J: np.ndarray
    """Seconds per step, as measured in warm-up."""
    chosen: int = -1
    """Index of the latest choice."""
    variance: float = _FIRST_VARIANCE
    """Relative variance of step times."""
    measured: int = -1
    """Index of the choice that was measured last."""
    num_in_a_row: int = 0
    """Number of consecutive steps with this choice that were measured."""
    num_large: int = 0
    """Number of consecutive steps outside `_LARGEST_CHANGE`."""
    seconds_J: np.ndarray = field(init=False)
    """Mean seconds per step, which starts as the time measured in warm-up."""
    first_J: np.ndarray = field(init=False)
    """Seconds of the first step with each choice until there is a second step, or 0."""
    num_measured_J: np.ndarray = field(init=False)
    """Number of steps in each mean. Below 1, the mean is out of date and is replaced by the faster of the next two
    steps with that choice. At 0, the choice has never been measured."""

    def __post_init__(self) -> None:
        self.seconds_J = self.warmed_J.copy()
        self.first_J, self.num_measured_J = np.zeros((2, len(self.warmed_J)))

    def estimate_seconds(self, others: Collection[_Size]) -> np.ndarray:
        """Return optimistic estimates of the seconds per step for each choice.

        If a choice has never been measured at this size, its warm-up time is scaled by the same factor as at the
        nearest size at which it was measured.
        """
        errors_J = np.sqrt(self.variance / np.maximum(self.num_measured_J, 1))
        estimates_J = self.seconds_J * (1 - _OPTIMISM * errors_J)
        for index in np.flatnonzero(self.num_measured_J == 0):
            measured = [other for other in others if other.num_measured_J[index]]
            if measured:
                nearest = min(measured, key=lambda other: max(other.rows / self.rows, self.rows / other.rows))
                factor = nearest.seconds_J[index] / nearest.warmed_J[index]
                estimates_J[index] = factor * min(estimates_J[index], self.warmed_J[index])
        return estimates_J

    def observe(self, index: int, seconds: float) -> None:
        """Update the means after a step with the choice at `index`."""
        self.num_in_a_row = self.num_in_a_row + 1 if index == self.measured else 1
        self.measured = index
        if self.num_measured_J[index] >= 1:
            self._average(index, seconds)
        elif not self.first_J[index]:
            self.first_J[index] = seconds
        else:
            self._replace(index, min(self.first_J[index], seconds))  # either step may include a pause
        is_other_J = np.arange(len(self.seconds_J)) != index
        self.seconds_J[is_other_J] *= 1 - _DOUBT / np.maximum(self.num_measured_J[is_other_J], 1)
        self.num_measured_J[is_other_J] *= 1 - _FORGET_STEPS
        self.seconds_J = np.maximum(self.seconds_J, self.seconds_J[index] / 100)

    def _replace(self, index: int, seconds: float) -> None:
        if not self.num_measured_J.any():
            self.seconds_J *= min(seconds / self.seconds_J[index], 1)
        self.seconds_J[index], self.num_measured_J[index], self.first_J[index] = seconds, 1, 0

    def _average(self, index: int, seconds: float) -> None:
        mean, num_measured_J = self.seconds_J[index], self.num_measured_J
        ratio = seconds / mean
        change = min(max(ratio, 1 / _LARGEST_CHANGE), _LARGEST_CHANGE) - 1
        self.num_large = self.num_large + 1 if change != ratio - 1 else 0
        if self.num_large == _LARGE_CHANGES:
            # Contexts or the load have changed. A decrease applies to all choices, so that no other choice looks slow.
            self.seconds_J += min(seconds - mean, 0)
            self.num_large = 0
            self.first_J[:] = 0
            np.minimum(num_measured_J, _OUT_OF_DATE, out=num_measured_J)
            return
        self.variance += _VARIANCE_SMOOTHING * (change**2 - self.variance)
        num_measured_J[index] = min(num_measured_J[index] + 1, _LONGEST_MEMORY)
        if self.num_in_a_row > _LONGEST_MEMORY:  # until then, a change may only be a correction of the mean
            self.seconds_J += min(max(change, -_LARGEST_DRIFT), _LARGEST_DRIFT) * mean / _LONGEST_MEMORY
        self.seconds_J[index] = mean * (1 + change / num_measured_J[index])


class StepTimes:
    """Step times by batch size and number of drafts, which are used to choose the number of drafts.

    Warm-up measures step times with short contexts and without waiting for the host, so most of them are too short. An
    estimate that is too short is corrected as soon as its choice runs, and every step shortens the estimates for all
    other choices. Once a choice has run for a while, small changes in its step time are applied to all choices, because
    they are caused by contexts or the load. After several large changes in a row, all choices are measured again.
    """

    def __init__(self, sizes: Sequence[int], choices: Sequence[int]) -> None:
        """Initialize without any measurements.

        Args:
            sizes: Batch sizes to which steps are padded.
            choices: The numbers of drafts that have separate decode shapes, in ascending order, starting with 0.
        """
        self._buckets = sizes
        self._choices = choices
        self._sizes: dict[int, _Size] = {}
        self._warmed: Mapping[int, Sequence[float]] = {}

    def start_from(self, warmed: Mapping[int, Sequence[float]]) -> None:
        """Start from the times measured in warm-up, which workers report with every step.

        Args:
            warmed: Maps a batch size to the seconds per step for each choice.
        """
        if warmed and not self._warmed:
            # Warm-up may have dropped sizes.
            self._warmed, self._sizes, self._buckets = warmed, {}, sorted(warmed)

    def choose(self, num_rows: int, tokens_J: np.ndarray, *, limit: int | None = None) -> int:
        """Return the number of drafts that maximizes the expected number of tokens per second.

        Args:
            num_rows: Number of rows in the step.
            tokens_J: Expected number of tokens from the step for 0, 1, ... drafts per row.
            limit: Maximum number that may be chosen. Defaults to the last choice.
        """
        size = self._at(num_rows)
        choices = [num for num in self._choices if limit is None or num <= limit]
        speeds = tokens_J[choices] / size.estimate_seconds(self._sizes.values())[: len(choices)]
        best = int(speeds.argmax())
        if not 0 <= size.chosen < len(choices) or speeds[best] > _WORTH_A_CHANGE * speeds[size.chosen]:
            size.chosen = best
        return choices[size.chosen]

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Record the time of a decode step. The previous step must have had the same size and numbers of drafts.

        Args:
            num_rows: Number of rows in the step.
            num_drafts: Number of drafts per row chosen for verification in this step.
            seconds: Time since the end of the previous step.
        """
        self._at(num_rows).observe(self._choices.index(num_drafts), seconds)

    def fit(self, num_rows: int) -> int:
        """Return the batch size to which a step with `num_rows` rows is padded."""
        return self._buckets[min(bisect_left(self._buckets, num_rows), len(self._buckets) - 1)]

    def _at(self, num_rows: int) -> _Size:
        bucket = self.fit(num_rows)
        if bucket not in self._sizes:
            warmed = self._warmed.get(bucket, [_UNKNOWN] * len(self._choices))
            self._sizes[bucket] = _Size(bucket, np.array(warmed, dtype=float))
        return self._sizes[bucket]

"""Adaptive verification, which chooses the number of drafts per row that maximizes the expected tokens per second.

All rows of a step share one shape, so the number of drafts per row determines the batch's token budget. The choice
depends on measured times and on the acceptance of earlier drafts, but never on drafts that await verification or on the
random noise that will verify them. Therefore, every acceptance rule stays exact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

_FORGET = 0.95
"""Factor by which each observation of a request reduces the weight of earlier observations."""
_FORGET_IDLE = 0.98
"""Like `_FORGET`, for a step without drafts. The estimate slowly reverts to the initial one, so drafts are retried."""
_FORGET_ALL = 0.998
"""Like `_FORGET`, for the overall acceptance rate."""
_PRIOR = 6.0
"""Weight of the overall acceptance rate in the estimate for one request, as a number of drafts."""
_LOWEST_RATE = 0.05
"""Lower bound on the overall acceptance rate, so that new requests always get a chance to draft."""


@dataclass(slots=True)
class _Count:
    accepted: float = 0.0
    expected: float = 0.0
    """Number of drafts tried or, for a draft position, number of acceptances that the requests' own rates predict."""

    def add(self, accepted: float, expected: float, keep: float) -> None:
        self.accepted = self.accepted * keep + accepted
        self.expected = self.expected * keep + expected

    def rate(self, prior: float) -> float:
        return (self.accepted + _PRIOR * prior) / (self.expected + _PRIOR)


class Acceptance:
    """Estimates how many of each request's drafts will be accepted."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._by_id: dict[str, _Count] = {}
        self._all = _Count()
        self._positions = [_Count() for _ in range(num_drafts)]
        """Number of accepted drafts at each position, and the number that the requests' own rates predict there."""

    def observe(self, req_id: str, num_drafted: int, num_accepted: int) -> None:
        """Record how many of a request's drafts were accepted. Drafts after the first rejected one are ignored."""
        num_tried = min(num_accepted + 1, max(num_drafted, 1))
        count = self._by_id.setdefault(req_id, _Count())
        rate = count.rate(self._average())
        count.add(num_accepted, num_tried, _FORGET)
        if not num_drafted:  # this says nothing about other requests
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
        return max(self._all.rate(1.0), _LOWEST_RATE)  # until drafts are rejected, they are worth trying

    def expect_tokens(self, max_drafts_by_id: dict[str, int]) -> np.ndarray:
        """Return the expected number of tokens in a step that verifies 0, 1, ..., k drafts per row.

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


_OWN_STEPS = 4
"""Number of consecutive steps that update only their own choice's estimate. Later steps update all estimates."""
_OWN_SMOOTHING = 1 / 2
"""Weight of each of these steps in the running mean for its choice."""
_SMOOTHING = 1 / 8
"""Weight of each later step."""
_LARGEST_CHANGE = 1.5
"""Maximum ratio of a step's time to the mean. A step that takes longer is assumed to include a pause."""
_STALE = 2.0
"""Ratio of a choice's measured time to its estimate above which the estimate is replaced. If a limit excludes a choice
for a long time, `_DOUBT` makes the estimate too short."""
_DOUBT = 1 / 4096
"""Fraction by which each step shortens the estimates for all other choices, so that each of them is eventually tried
again. The machine may have been busy when a choice was measured."""
_WORTH_A_CHANGE = 1.02
"""Minimum speedup for which the choice changes."""
_UNKNOWN = 1e-6
"""Assumed seconds per step for choices that warm-up did not measure, short enough that each of them is tried."""


@dataclass(slots=True)
class _Size:
    """The state for one batch size. J is the number of choices."""

    seconds_J: np.ndarray
    """Estimated seconds per step, initially as measured in warm-up."""
    chosen: int = -1
    """Index of the latest choice."""
    measured: int = -1
    """Index of the choice that was measured last."""
    num_measured: int = 0
    """Number of consecutive steps that measured this choice."""
    first: float = 0.0
    """Seconds taken by the first step of a choice whose time is not yet known."""
    is_known_J: np.ndarray = field(init=False)
    """Whether a step has replaced the choice's warm-up time."""

    def __post_init__(self) -> None:
        self.is_known_J = np.zeros(len(self.seconds_J), dtype=bool)


class StepTimes:
    """Step times by batch size and number of drafts, from which the number of drafts is chosen.

    Warm-up measures these times with short contexts and without waiting for the host, so most of them are too short. An
    estimate that is too short is corrected as soon as its choice runs, and the other choices' estimates shrink with
    every step. Later changes in one choice's time are applied to all choices, because contexts or load have changed.
    """

    def __init__(self, sizes: Sequence[int], choices: Sequence[int]) -> None:
        """Start without measurements.

        Args:
            sizes: Batch sizes to which steps are padded.
            choices: Numbers of drafts that have separate decode shapes, in ascending order, starting with 0.
        """
        self._buckets = sizes
        self._choices = choices
        self._sizes: dict[int, _Size] = {}
        self._warmed: Mapping[int, Sequence[float]] = {}

    def start_from(self, warmed: Mapping[int, Sequence[float]]) -> None:
        """Start from the times measured in warm-up, which arrive with the output of every step.

        Args:
            warmed: Maps a batch size to the seconds per step for each choice.
        """
        if warmed and not self._warmed:
            self._warmed, self._sizes = warmed, {}

    def choose(self, num_rows: int, tokens_J: np.ndarray, *, limit: int | None = None) -> int:
        """Return the number of drafts that maximizes the expected number of tokens per second.

        Args:
            num_rows: Number of rows in the step.
            tokens_J: Expected number of tokens in the step for 0, 1, ... drafts per row.
            limit: Maximum number that may be chosen. Defaults to the last choice.
        """
        size = self._at(num_rows)
        choices = [num for num in self._choices if limit is None or num <= limit]
        speeds = tokens_J[choices] / size.seconds_J[: len(choices)]
        best = int(speeds.argmax())
        if not 0 <= size.chosen < len(choices) or speeds[best] > _WORTH_A_CHANGE * speeds[size.chosen]:
            size.chosen = best
        return choices[size.chosen]

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Record a decode step. The previous and next steps must have the same size and number of drafts.

        Args:
            num_rows: Number of rows in the step.
            num_drafts: Number of drafts per row that were chosen for the step to verify.
            seconds: Time since the previous step ended.
        """
        size, index = self._at(num_rows), self._choices.index(num_drafts)
        size.num_measured = size.num_measured + 1 if index == size.measured else 1
        size.measured = index
        expected = size.seconds_J[index]
        change = min(seconds, _LARGEST_CHANGE * expected) - expected
        if size.num_measured == 1:
            size.first = seconds
        elif size.num_measured == 2 and min(size.first, seconds) > _STALE * expected:
            size.is_known_J[index] = False
        if not size.is_known_J[index]:
            if size.num_measured > 1:
                seconds = min(size.first, seconds)  # either one may include a pause
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
        """Return the batch size to which a step with `num_rows` rows is padded."""
        return self._buckets[min(bisect_left(self._buckets, num_rows), len(self._buckets) - 1)]

    def _at(self, num_rows: int) -> _Size:
        bucket = self.fit(num_rows)
        if bucket not in self._sizes:
            warmed = self._warmed.get(bucket, [_UNKNOWN] * len(self._choices))
            self._sizes[bucket] = _Size(np.array(warmed, dtype=float))
        return self._sizes[bucket]

"""Adaptive verification: choose how many drafts per row the next step verifies, by expected tokens per second.

All rows of a step share one shape, so the number of drafts per row is the batch's token budget. The choice depends on
measured times and on the acceptance of earlier drafts, never on drafts that are still to be verified or on the noise
that will verify them. Therefore every acceptance rule stays exact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.logger import init_logger

logger = init_logger(__name__)

_FORGET = 0.93
"""The factor by which an observation of a request reduces the weight of those before it."""
_FORGET_IDLE = 0.995
"""The same for a step without drafts: the estimate slowly returns to that of a new request, which is tried again."""
_FORGET_ALL = 0.998
"""The same for the acceptance rates of all requests."""
_PRIOR = 4.0
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

    def observe_idle(self, req_id: str) -> None:
        """Record a step of a request without drafts."""
        if (count := self._by_id.get(req_id)) is not None:
            count.add(0, 0, _FORGET_IDLE)

    def forget(self, req_ids: Collection[str]) -> None:
        for req_id in req_ids:
            self._by_id.pop(req_id, None)

    def _average(self) -> float:
        return max(self._all.rate(0.5), _LOWEST_RATE)

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


_SMOOTHING = 1 / 8
"""The weight of a step's time in the mean of its choice."""
_LARGEST_CHANGE = 2.0
"""The factor by which one step's time may differ from the mean: a longer step is a pause."""
_TRIAL = 4
"""The number of measured steps after which a trial ends."""
_LONGEST_TRIAL = 32
"""The number of steps after which a trial ends without a result: something else kept its choice from running."""
_TRIALS_COST = 0.01
"""The share of time that trials may cost."""
_SHORTEST_WAIT = 64
"""The minimum number of steps between two trials."""
_PROMISING = 0.8
"""The expected speed, as a share of the chosen one's, from which a number of drafts is tried at once in a new size."""
_WORTH_A_CHANGE = 1.02
"""The speedup for which the choice changes."""


@dataclass(slots=True)
class _Size:
    """The state of one batch size."""

    chosen: int
    """The number of drafts of the most recent choice."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Maps a number of drafts to the mean time of a step."""
    is_estimate: bool = False
    """Whether `seconds` are those of another size, of which only the ratios count."""
    speed: float = 0.0
    """The expected tokens per second of the most recent choice, or 0 if its time is unknown."""
    num_steps: int = 0
    tried: dict[int, int] = field(default_factory=dict)
    """Maps a number of drafts to the step at which its last trial ended."""
    wait: float = 0.0
    """Steps until the next trial."""
    trial: int | None = None
    """The number of drafts that is on trial."""
    trial_steps: int = 0
    samples: dict[int, list[float]] = field(default_factory=dict)
    """Times of measured steps of unfinished trials, by number of drafts."""
    lost: float = 0.0
    """Seconds that the current trial has cost."""


class StepTimes:
    """Times of steps by batch size and number of drafts, and the choice of the number of drafts.

    Steps of the chosen number are always measured, others in short trials. A change of the chosen number's time is
    taken as a change of all, since contexts and load have changed.
    """

    def __init__(self, sizes: Sequence[int], choices: Sequence[int]) -> None:
        """Start without measurements.

        Args:
            sizes: Batch sizes that steps are padded to.
            choices: Numbers of drafts that have decode shapes of their own, in ascending order.
        """
        self._buckets = sizes
        self._choices = choices
        self._sizes: dict[int, _Size] = {}

    def choose(self, num_rows: int, tokens_J: np.ndarray, *, limit: int | None = None, may_try: bool = True) -> int:
        """Return the number of drafts with the most expected tokens per second.

        Args:
            num_rows: Number of rows of the step.
            tokens_J: Expected number of tokens of the step for 0, 1, ... drafts per row.
            limit: The largest number that may be chosen. Default: the last of the choices.
            may_try: Whether the step may be part of a trial.
        """
        size = self._at(num_rows)
        choices = [num for num in self._choices if limit is None or num <= limit]
        speeds = {num: tokens_J[num] / size.seconds[num] for num in choices if num in size.seconds}
        size.chosen = min(size.chosen, choices[-1])
        if speeds:
            best = max(speeds, key=speeds.__getitem__)
            if size.chosen not in speeds or speeds[best] > _WORTH_A_CHANGE * speeds[size.chosen]:
                if not size.chosen or not best:
                    _log_change(self.fit(num_rows), best, speeds)
                size.chosen = best
            size.speed = speeds[size.chosen]
        if not may_try:
            return size.chosen
        if size.trial is None and not size.is_estimate:
            size.trial = self._choose_trial(size, choices, speeds)
        return size.trial if size.trial in choices else size.chosen

    def _choose_trial(self, size: _Size, choices: list[int], speeds: dict[int, float]) -> int | None:
        """Return the number of drafts to try now, or None."""
        unknown = [num for num in choices if num not in speeds and (size.wait <= 0 or num not in size.tried)]
        if unknown:
            # After a trial without a result the next one is of another number.
            return min(reversed(unknown), key=lambda num: size.tried.get(num, 0))
        if not speeds:
            return None
        others = {num: speed / speeds[size.chosen] for num, speed in speeds.items() if num != size.chosen}
        # A number that was never measured at this size and may well be the fastest is tried without waiting.
        if promising := [num for num, ratio in others.items() if ratio > _PROMISING and num not in size.tried]:
            return max(promising, key=others.__getitem__)

        def urgency(num: int) -> float:
            # Slow choices are tried less often: they cost more, and are less likely to become the fastest.
            return (size.num_steps - size.tried.get(num, 0)) * others[num] ** 4

        return max(others, key=urgency, default=None) if size.wait <= 0 else None

    def observe(self, num_rows: int, num_drafts: int, seconds: float, num_tokens: int, *, steady: bool) -> None:
        """Record a finished decode step.

        Args:
            num_rows: Number of rows of the step.
            num_drafts: The number of drafts per row that were chosen for the step to verify.
            seconds: The time since the step before it ended.
            num_tokens: The number of tokens that the step returned.
            steady: Whether the step before it had the same size and number of drafts, and as many drafts follow it.
        """
        size = self._at(num_rows)
        size.num_steps += 1
        if size.trial is not None:
            self._observe_trial(size, num_drafts, seconds, num_tokens, steady=steady)
            return
        size.wait -= 1
        if not steady or num_drafts not in size.seconds:
            return
        change = seconds / size.seconds[num_drafts]
        if not size.is_estimate:
            change = 1 + _SMOOTHING * (min(max(change, 1 / _LARGEST_CHANGE), _LARGEST_CHANGE) - 1)
        size.is_estimate = False
        size.seconds = {num: mean * change for num, mean in size.seconds.items()}

    def _observe_trial(self, size: _Size, num_drafts: int, seconds: float, num_tokens: int, *, steady: bool) -> None:
        assert size.trial is not None
        size.trial_steps += 1
        usual = size.seconds.get(size.chosen, seconds)
        if size.speed:
            size.lost += min(seconds, 4 * usual) - num_tokens / size.speed
        samples = size.samples.setdefault(size.trial, [])
        if steady and num_drafts == size.trial:
            samples.append(seconds)
        if len(samples) >= _TRIAL:
            fastest = sorted(samples)[:-1]  # something may have disturbed the slowest
            size.seconds[size.trial] = sum(fastest) / len(fastest)
            size.wait = max(_SHORTEST_WAIT, size.lost / usual / _TRIALS_COST)
            samples.clear()
        elif size.trial_steps >= _LONGEST_TRIAL:
            size.wait = _SHORTEST_WAIT
        else:
            return
        size.tried[size.trial] = size.num_steps
        size.trial, size.trial_steps, size.lost = None, 0, 0.0

    def fit(self, num_rows: int) -> int:
        """Return the batch size that a step of `num_rows` rows is padded to."""
        return self._buckets[min(bisect_left(self._buckets, num_rows), len(self._buckets) - 1)]

    def _at(self, num_rows: int) -> _Size:
        bucket = self.fit(num_rows)
        if bucket not in self._sizes:
            self._sizes[bucket] = self._start_like_nearest(bucket)
        return self._sizes[bucket]

    def _start_like_nearest(self, bucket: int) -> _Size:
        """Return the state of a new size, which starts with the times of the nearest measured one."""
        measured = [other for other, size in self._sizes.items() if len(size.seconds) > 1 and not size.is_estimate]
        if not measured:
            return _Size(self._choices[-1])  # the first size has its trials at once
        nearest = self._sizes[min(measured, key=lambda other: max(other, bucket) / min(other, bucket))]
        return _Size(nearest.chosen, dict(nearest.seconds), is_estimate=True, wait=_SHORTEST_WAIT)


def _log_change(num_rows: int, num_drafts: int, speeds: dict[int, float]) -> None:
    logger.info(
        "Speculation is %s for batches of up to %d requests. Expected tokens/s by number of drafts: %s.",
        "on" if num_drafts else "off",
        num_rows,
        ", ".join(f"{number}: {speed:.1f}" for number, speed in sorted(speeds.items())),
    )

"""Goodput: drafts only while it is faster, by measured tokens per second with and without drafts at each batch size.

Steps of the chosen mode are always measured, those of the other mode in short trials, which may cost 1 % of the time.
A trial is compared with the steps right before it, so that slow changes of the machine or of the contexts cancel out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_WINDOW = 16
"""The number of most recent steps that are averaged."""
_TRIAL = 8
"""The number of measured steps after which a trial ends."""
_TRIALS_COST = 0.01
"""The share of time that trials may cost."""
_SHORTEST_WAIT = 64
"""The minimum number of steps between two trials."""
_STALE = 64
"""The number of steps of other sizes after which the measurements of a size are dropped."""
_LONGEST_TRIAL = 64
"""The number of steps after which a trial ends without a result: something else kept its mode from running."""
_MOST_LOST = 10
"""The maximum cost of one step of a trial, in ordinary steps: a longer step is a pause, not the cost of the mode."""
_COME_BACK = 1.05
"""The speedup at which drafting resumes. It stops as soon as it is slower; the gap prevents flapping."""


@dataclass(slots=True)
class _Window:
    """(seconds, tokens per row) of the most recent steps of one mode."""

    steps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def speed(self) -> float:
        """Tokens per second and row. The slowest step is left out, as something may have disturbed it."""
        fastest = sorted(self.steps)[:-1] or self.steps
        seconds = sum(step[0] for step in fastest)
        return sum(step[1] for step in fastest) / seconds if seconds else 0.0


@dataclass(slots=True)
class _Size:
    """The state of one batch size."""

    drafting: bool = True
    wait: float = 0.0
    """Steps until the next trial."""
    trial_steps: int = 0
    """Steps of the current trial, or 0 without one."""
    lost: float = 0.0
    """Seconds that the current trial has cost."""
    last_step: int = 0
    """The number of the most recent step of this size, counted over all sizes."""
    modes: dict[bool, _Window] = field(default_factory=lambda: {True: _Window(), False: _Window()})

    @property
    def on_trial(self) -> bool:
        return self.trial_steps > 0

    @property
    def chosen(self) -> _Window:
        return self.modes[self.drafting]

    @property
    def other(self) -> _Window:
        return self.modes[not self.drafting]

    def begin_trial(self) -> None:
        self.trial_steps, self.lost = 1, 0.0
        self.other.steps.clear()

    def drop_trial(self) -> None:
        self.trial_steps, self.wait = 0, _SHORTEST_WAIT


class Goodput:
    """Chooses between decoding with and without drafts for each batch size."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """Start without measurements. `sizes` are the batch sizes that steps are padded to."""
        self._buckets = sizes
        self._sizes: dict[int, _Size] = {}
        self._num_steps = 0

    def should_draft(self, num_rows: int, *, may_try: bool = True) -> bool:
        """Whether a step of `num_rows` rows should draft. Without `may_try` the step is not part of a trial."""
        size = self._at(num_rows)
        return size.drafting != (size.on_trial and may_try)

    def speeds(self, num_rows: int) -> tuple[float, float]:
        """Return the last measured tokens per second and row, with and without drafts; 0 if not measured yet."""
        size = self._at(num_rows)
        return size.modes[True].speed, size.modes[False].speed

    def observe(self, num_rows: int, drafted: bool, seconds: float, num_tokens: int, *, steady: bool) -> bool:
        """Record a finished decode step and return whether the choice changed.

        Args:
            drafted: Whether the step had drafts to verify.
            steady: Whether the step before it had the same mode and size.
        """
        size, tokens_per_row = self._step_size(num_rows), num_tokens / num_rows
        if size.on_trial:
            usual = tokens_per_row / size.chosen.speed
            size.lost += min(seconds, _MOST_LOST * usual) - usual
        if steady:
            size.modes[drafted].steps.append((seconds, tokens_per_row))
        if not size.on_trial:
            size.wait -= 1
            if size.wait <= 0 and len(size.chosen) >= _TRIAL:
                size.begin_trial()
            return False
        if len(size.other) >= _TRIAL:
            return self._end_trial(size)
        size.trial_steps += 1
        if size.trial_steps > _LONGEST_TRIAL:
            size.drop_trial()
        return False

    def _step_size(self, num_rows: int) -> _Size:
        """Return the state of a step's size. Old measurements are dropped, as contexts and load have changed."""
        size = self._at(num_rows)
        self._num_steps += 1
        if self._num_steps - size.last_step > _STALE and size.last_step:
            size.chosen.steps.clear()
            if size.on_trial:
                size.drop_trial()
        size.last_step = self._num_steps
        return size

    def _end_trial(self, size: _Size) -> bool:
        with_drafts, without = size.modes[True].speed, size.modes[False].speed
        drafting = with_drafts >= without * (1.0 if size.drafting else _COME_BACK)
        changed, size.drafting, size.trial_steps = drafting != size.drafting, drafting, 0
        seconds_per_step = sum(step[0] for step in size.chosen.steps) / len(size.chosen)
        size.wait = max(_SHORTEST_WAIT, size.lost / seconds_per_step / _TRIALS_COST)
        return changed

    def _at(self, num_rows: int) -> _Size:
        bucket = self._buckets[min(bisect_left(self._buckets, num_rows), len(self._buckets) - 1)]
        if bucket not in self._sizes:
            self._sizes[bucket] = self._start_like_nearest(bucket)
        return self._sizes[bucket]

    def _start_like_nearest(self, bucket: int) -> _Size:
        """Return the state of a new size, which starts with the choice of the nearest tried size."""
        # The first size has its trial at once.
        tried = [other for other, size in self._sizes.items() if len(size.other)]
        if not tried:
            return _Size()
        nearest = min(tried, key=lambda other: max(other, bucket) / min(other, bucket))
        return _Size(drafting=self._sizes[nearest].drafting, wait=_SHORTEST_WAIT)

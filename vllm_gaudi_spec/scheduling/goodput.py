"""Whether drafting pays: tokens a second with drafts beside those without, by batch size, both as served.

Steps of one way are measured all the time; those of the other in short trials, which may cost a hundredth of the time.
A trial is compared with the steps right before it, so that slow changes of the machine or of the contexts cancel out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_WINDOW = 16
"""Newest steps that count."""
_TRIAL = 8
"""Steps of a trial that count."""
_TRIALS_COST = 0.01
_SHORTEST_WAIT = 64
"""Steps between two trials, at least."""
_STALE = 64
"""Steps of other sizes after which what was measured of one is of another time."""
_LONGEST_TRIAL = 64
"""Steps after which a trial ends without an answer: its way was not taken, for reasons of others."""
_MOST_LOST = 10
"""Ordinary steps that one step of a trial may be charged with: more is a pause, and not what the other way costs."""
_COME_BACK = 1.05
"""Drafting is taken up again when it is so much faster, and given up when it is slower: no flapping between."""


@dataclass(slots=True)
class _Window:
    """Seconds and tokens a row of the newest steps of one way."""

    steps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def speed(self) -> float:
        """Tokens a second of each row. The slowest step is left out: it was disturbed, if one was."""
        kept = sorted(self.steps)[:-1] or self.steps
        seconds = sum(step[0] for step in kept)
        return sum(step[1] for step in kept) / seconds if seconds else 0.0


@dataclass(slots=True)
class _Size:
    """What is known of one batch size."""

    drafting: bool = True
    wait: float = 0.0
    """Steps until the next trial."""
    trial_steps: int = 0
    """Steps of the running trial; 0 without one."""
    lost: float = 0.0
    """Seconds that the running trial has cost."""
    last_step: int = 0
    """Of all steps, the newest of this size."""
    ways: dict[bool, _Window] = field(default_factory=lambda: {True: _Window(), False: _Window()})

    @property
    def on_trial(self) -> bool:
        return self.trial_steps > 0

    @property
    def chosen(self) -> _Window:
        return self.ways[self.drafting]

    @property
    def other(self) -> _Window:
        return self.ways[not self.drafting]

    def begin_trial(self) -> None:
        self.trial_steps, self.lost = 1, 0.0
        self.other.steps.clear()

    def drop_trial(self) -> None:
        self.trial_steps, self.wait = 0, _SHORTEST_WAIT


class Goodput:
    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes`: those that batches are padded to; steps of one size cost the same."""
        self._buckets = sizes
        self._sizes: dict[int, _Size] = {}
        self._num_steps = 0

    def drafts(self, num_rows: int, *, may_try: bool = True) -> bool:
        """Whether a step of so many rows is to draft. Without `may_try` only as was found best."""
        size = self._at(num_rows)
        return size.drafting != (size.on_trial and may_try)

    def speeds(self, num_rows: int) -> tuple[float, float]:
        """Tokens a second of each row with drafts and without, as last measured; 0 where they never were."""
        size = self._at(num_rows)
        return size.ways[True].speed, size.ways[False].speed

    def observe(self, num_rows: int, drafted: bool, seconds: float, num_tokens: int, *, steady: bool) -> bool:
        """A decode step was done. `drafted`: the way it went; `steady`: the step before it went the same way and had
        the same size. Returns whether the choice changed."""
        size, tokens_a_row = self._seen(num_rows), num_tokens / num_rows
        if size.on_trial:
            usual = tokens_a_row / size.chosen.speed
            size.lost += min(seconds, _MOST_LOST * usual) - usual
        if steady:
            size.ways[drafted].steps.append((seconds, tokens_a_row))
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

    def _seen(self, num_rows: int) -> _Size:
        """The size of a step. One that comes back after long is measured anew: contexts and loads were others."""
        size = self._at(num_rows)
        self._num_steps += 1
        if self._num_steps - size.last_step > _STALE and size.last_step:
            size.chosen.steps.clear()
            if size.on_trial:
                size.drop_trial()
        size.last_step = self._num_steps
        return size

    def _end_trial(self, size: _Size) -> bool:
        with_drafts, without = (size.ways[way].speed for way in (True, False))
        drafting = with_drafts >= without * (1.0 if size.drafting else _COME_BACK)
        changed, size.drafting, size.trial_steps = drafting != size.drafting, drafting, 0
        seconds_a_step = sum(step[0] for step in size.chosen.steps) / len(size.chosen)
        size.wait = max(_SHORTEST_WAIT, size.lost / seconds_a_step / _TRIALS_COST)
        return changed

    def _at(self, num_rows: int) -> _Size:
        bucket = self._buckets[min(bisect_left(self._buckets, num_rows), len(self._buckets) - 1)]
        if bucket not in self._sizes:
            self._sizes[bucket] = self._like_its_neighbour(bucket)
        return self._sizes[bucket]

    def _like_its_neighbour(self, bucket: int) -> _Size:
        """A size that was never seen starts as the nearest that was; the very first drafts, and is tried at once."""
        tried = [size for size, known in self._sizes.items() if len(known.other)]
        if not tried:
            return _Size()
        nearest = min(tried, key=lambda size: max(size, bucket) / min(size, bucket))
        return _Size(drafting=self._sizes[nearest].drafting, wait=_SHORTEST_WAIT)

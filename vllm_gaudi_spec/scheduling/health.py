"""Whether a drafter can be relied on. Decided where vLLM schedules, so that all ranks are told the same with a step.

Drafts that can not be used cost no request anything: their rows go on as if nothing had been drafted. A round in which
nobody's drafts could be used speaks against the drafter, and three of those in a row switch it off for good. A row that
fails while its neighbours' drafts are good is what is wrong itself, and drafts no more. So is a request that fails
twice in a row with nobody beside it: one that finds the server empty can not speak for those that come later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

from vllm_gaudi_spec.records import DraftRound
from vllm_gaudi_spec.scheduling import counts, metrics

logger = logging.getLogger(__name__)

MOST_IN_A_ROW = 3


class Word(NamedTuple):
    """What workers are told of their drafter."""

    again: tuple[str, ...]
    """Requests for which it shall start anew: what it has read of them is not to be relied on."""
    never: tuple[str, ...]
    """Requests that draft no more."""
    is_off: bool
    num_faults: int
    """Rounds with drafts that could not be used, so far."""


class DrafterHealth:
    def __init__(self) -> None:
        self.is_off = False
        self.num_faults = 0
        self._in_a_row = 0
        self._last_alone: str | None = None
        """The request that was all of the last round, if that was faulty."""
        self._again: dict[str, None] = {}
        self._never: dict[str, None] = {}
        self._told = 0

    def heard(self, rounds: Iterable[DraftRound]) -> int:
        """Returns how many of them were faulty."""
        before = self.num_faults
        for done in rounds:
            if not done.faulty:
                self._in_a_row, self._last_alone = 0, None
                continue
            self.num_faults += 1
            alone = done.faulty[0] if len(done.faulty) == 1 and not done.worked else None
            is_the_same = alone is not None and alone == self._last_alone
            self._last_alone = alone
            if done.worked:
                self._in_a_row = 0
            elif not is_the_same:
                self._in_a_row += 1
            (self._never if done.worked or is_the_same else self._again).update(dict.fromkeys(done.faulty))
            if self._in_a_row == MOST_IN_A_ROW and not self.is_off:
                self.is_off = True
                logger.error(
                    "The drafter is switched off until the next start: its drafts could not be used %d times in a row. "
                    "Requests go on without speculation. What was wrong stands in the warnings above.",
                    MOST_IN_A_ROW,
                )
        return self.num_faults - before

    def word(self) -> Word | None:
        """What there is to tell since the last time."""
        if self._told == self.num_faults:
            return None
        told = Word(tuple(self._again), tuple(self._never), self.is_off, self.num_faults)
        self._told = self.num_faults
        self._again.clear()
        self._never.clear()
        return told


# --- a scheduler of vLLM's ---

_HEALTH = "_gaudi_spec_drafter_health"


def hear(scheduler: Any, output: Any) -> None:
    """A step is done."""
    rounds = getattr(output, "draft_rounds", None)
    if not rounds:
        return
    health = vars(scheduler).setdefault(_HEALTH, DrafterHealth())
    was_off = health.is_off
    if faults := health.heard(rounds):
        metrics.count(scheduler, metrics.DRAFTER_FAULTS, faults)
    if health.is_off and not was_off:
        metrics.count(scheduler, metrics.DRAFTER_SWITCHED_OFF)


def tell(scheduler: Any, scheduled: Any) -> None:
    """A step is scheduled: how much is drafted behind it may still be changed."""
    health = vars(scheduler).get(_HEALTH)
    if health is None:
        return
    if health.is_off:
        scheduled.num_spec_tokens_to_schedule = 0
        scheduled.spared_for = metrics.OFF
    if (word := health.word()) is not None:
        scheduled.drafter_word = word
        counts.exclude(scheduler, word.never)

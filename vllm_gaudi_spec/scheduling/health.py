"""The health of a drafter. The scheduler decides, so that all ranks get the same decision with a step.

Unusable drafts cost a request nothing: its row goes on as if nothing had been drafted.

- A round without usable drafts counts against the drafter; three such rounds in a row switch it off until the restart.
- A request that fails while others of its round have usable drafts is excluded from drafting.
- So is a request that fails twice in a row as the only one of its round: alone on an idle server it is no evidence
  about later requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from vllm_gaudi_spec.outputs import DrafterStatus
from vllm_gaudi_spec.records import DraftRound

logger = logging.getLogger(__name__)

MOST_IN_A_ROW = 3


class DrafterHealth:
    def __init__(self) -> None:
        self.is_off = False
        self.num_faults = 0
        self._in_a_row = 0
        self._last_alone: str | None = None
        """The only request of the last round, if that was faulty."""
        self._restarted: dict[str, None] = {}
        self._excluded: dict[str, None] = {}
        self._num_reported = 0

    def observe(self, rounds: Iterable[DraftRound]) -> int:
        """Takes finished rounds; returns how many of them were faulty."""
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
            (self._excluded if done.worked or is_the_same else self._restarted).update(dict.fromkeys(done.faulty))
            if self._in_a_row == MOST_IN_A_ROW and not self.is_off:
                self.is_off = True
                logger.error(
                    "The drafter is switched off until the next start: its drafts could not be used %d times in a row. "
                    "Requests go on without speculation. The warnings above have the reasons.",
                    MOST_IN_A_ROW,
                )
        return self.num_faults - before

    def take_status(self) -> DrafterStatus | None:
        """The news for the workers since the last call; None if there are none."""
        if self._num_reported == self.num_faults:
            return None
        status = DrafterStatus(tuple(self._restarted), tuple(self._excluded), self.is_off, self.num_faults)
        self._num_reported = self.num_faults
        self._restarted.clear()
        self._excluded.clear()
        return status

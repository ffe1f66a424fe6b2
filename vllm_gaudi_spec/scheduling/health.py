"""Health checks that disable a failing drafter. The scheduler makes the decision and sends it to all ranks with a step.

Unusable drafts do not affect the output of a request, which decodes as if nothing had been drafted.

- A step in which no drafts are usable counts against the drafter. Three such steps in a row disable it until a restart.
- A request is excluded from drafting if its drafts fail while those of other requests in the step succeed.
- A request is also excluded if its drafts fail in two consecutive steps without other requests. On an otherwise idle
  server, such failures provide no information about later requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from vllm_gaudi_spec.outputs import DrafterStatus
from vllm_gaudi_spec.records import DraftRound

logger = logging.getLogger(__name__)

MAX_FAULTS_IN_A_ROW = 3


class DrafterHealth:
    """Counts failures of the drafter, excludes requests from drafting, and disables the drafter."""

    def __init__(self) -> None:
        self.is_off = False
        self.num_faults = 0
        self._in_a_row = 0
        self._last_alone: str | None = None
        """The only request in the most recent round of drafting, if its drafts failed; otherwise, None."""
        self._restarted: dict[str, None] = {}
        self._excluded: dict[str, None] = {}
        self._num_reported = 0

    def observe(self, rounds: Iterable[DraftRound]) -> int:
        """Record the outcomes of drafting and return the number of failures among them."""
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
            if self._in_a_row == MAX_FAULTS_IN_A_ROW and not self.is_off:
                self.is_off = True
                logger.error(
                    "Speculative decoding is disabled until the server restarts: in %d rounds in a row the drafter "
                    "raised an error, which is logged above, or returned invalid tokens, counts or logits. Requests "
                    "continue without speculation.",
                    MAX_FAULTS_IN_A_ROW,
                )
        return self.num_faults - before

    def take_status(self) -> DrafterStatus | None:
        """Return changes for the workers since the last call, or None if there are none."""
        if self._num_reported == self.num_faults:
            return None
        status = DrafterStatus(tuple(self._restarted), tuple(self._excluded), self.is_off, self.num_faults)
        self._num_reported = self.num_faults
        self._restarted.clear()
        self._excluded.clear()
        return status

"""Whether the two vocabularies share enough to be worth drafting with, seen on the prompts that came in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.logger import init_logger

logger = init_logger(__name__)

ENOUGH = 0.8
"""Of the tokens that the target reads and writes. A draft ends, at the latest, at the first token without a partner: at
0.8 that alone holds the mean accepted length under five."""
_NUM_SEEN = 2000


class Coverage:
    """Says once, when it has seen enough, that too few tokens have a partner."""

    def __init__(self, target_to_draft: np.ndarray) -> None:
        self._matched_V = target_to_draft >= 0
        self._num_seen = self._num_matched = 0
        self._judged = False

    def saw(self, prompt: Sequence[int]) -> None:
        if self._judged:
            return
        self._num_seen += len(prompt)
        self._num_matched += int(self._matched_V[np.asarray(prompt, dtype=np.int64)].sum())
        if self._num_seen < _NUM_SEEN:
            return
        self._judged = True
        share = self._num_matched / self._num_seen
        if share < ENOUGH:
            logger.warning(
                "The drafter has only %.0f%% of the tokens in the prompts seen (%d of %d), so most of its drafts can "
                "not be what the target says. universal_context retokenize with universal_match slem, in "
                "additional_config.gaudi_spec, drafts with the drafter's whole vocabulary; another drafter, or method "
                "ngram, may serve better.",
                100 * share,
                self._num_matched,
                self._num_seen,
            )

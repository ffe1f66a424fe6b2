"""Branches: which parts of sampling a batch needs. There are few enough branches to capture or compile each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

# Sizes that depend on a request come from closed lists, so that no request creates a new shape.
_USUAL_TOP_K = 64
TOP_K_LISTS = (_USUAL_TOP_K, 1024)
SCORED_COUNTS = (8, 32, 128)
USUAL_LOGPROBS = 20
IN_LIST, SEARCHED = 1, 2


class Branch(NamedTuple):
    """Parts of sampling that a batch needs: the largest value of each field over its requests.

    Devices that capture graphs do so for few branches: see `coarsen`, and `merge` for compiled graphs.
    """

    random: bool = False
    min_p: bool = False
    top_k: int = 0
    """Length of the list of largest logits that covers every request's k; the vocabulary size if no list does."""
    top_p: int = 0
    """`IN_LIST`: within that list; `SEARCHED`: over the whole vocabulary."""
    edited: bool = False
    """Whether a request has logit edits or a thinking budget."""
    constrained: bool = False
    """Whether a request has a grammar."""
    masked: bool = False
    """Whether a request has allowed tokens."""
    penalized: bool = False
    scored: int = 0
    """The most token ids that a request named for log-probabilities."""
    reported: bool = False
    """Whether a request asks for the log-probability of the sampled token."""
    num_logprobs: int = 0
    """The most likely tokens whose log-probabilities are reported with it."""

    @classmethod
    def largest(cls, branches_BF: np.ndarray) -> Branch:
        """Return the largest of several branches, given as numbers; 0 means that a field is not set."""
        if not branches_BF.any():
            return cls()
        values = branches_BF.max(axis=0).tolist()
        return cls._make(type(none)(value) for none, value in zip(cls(), values, strict=True))

    def select_drafting(self, mode: str) -> Branch:
        """Return the part that drafters apply: unless they are greedy, they sample inside a request's support."""
        if mode == "greedy":
            return Branch()
        return Branch(random=self.random, min_p=self.min_p, top_k=self.top_k, top_p=self.top_p)

    def select_reports(self) -> Branch:
        """Return the part that concerns what is reported to the host besides tokens."""
        return Branch(scored=self.scored, reported=self.reported, num_logprobs=self.num_logprobs)

    def coarsen(self, vocab_size: int, logprob_counts: tuple[int, ...]) -> Branch:
        """Return a branch that includes this one, from a set so small that each can be captured.

        Unused parts get neutral values, so results are the same.
        """
        top_k, top_p = self.top_k, self.top_p
        if top_k == vocab_size or (top_k and top_p == SEARCHED):
            top_k, top_p = vocab_size, SEARCHED
        elif top_k:
            top_p = IN_LIST
        return self._extend(
            (top_k, top_p),
            edits=self.edited or self.constrained or self.masked or self.penalized,
            reports=self.reported or bool(self.scored),
            logprob_counts=logprob_counts,
        )

    def _extend(
        self, filters: tuple[int, int], *, edits: bool, reports: bool, logprob_counts: tuple[int, ...]
    ) -> Branch:
        """Return a branch with these filters, and with all logit edits and all reports or none."""
        top_k, top_p = filters
        return Branch(
            random=self.random,
            min_p=self.random,
            top_k=top_k,
            top_p=top_p,
            edited=edits,
            constrained=edits,
            masked=edits,
            penalized=edits,
            scored=SCORED_COUNTS[-1] if reports else 0,
            reported=reports,
            num_logprobs=fit_size(select_coarse_counts(logprob_counts), max(self.num_logprobs, 1)) if reports else 0,
        )

    def merge(self, vocab_size: int, logprob_counts: tuple[int, ...], *, joint: bool = False) -> Branch:
        """Return a branch that includes this one, from an even smaller set, so that each can be compiled.

        What many requests use has its own branches: the argmax, noise, a short list for top-k, a search for top-p.
        Everything else is in a `full` branch: logit edits, penalties, masks, log-probabilities, and a longer top-k.

        Args:
            joint: Use an even smaller set, for rules that read the positions of a row together: sampled verify steps
                then have their own graphs.
        """
        usual_length = usual_list_length(vocab_size)
        is_full = any(self._replace(random=False, min_p=False, top_k=0, top_p=0)) or self.top_k > usual_length
        top_k, top_p = self.top_k, self.top_p
        # To limit the number of full branches, those that sample have all filters.
        has_few_full = joint or len(select_coarse_counts(logprob_counts)) > 1
        if is_full and (top_k or top_p or (self.random and has_few_full)):
            top_k, top_p = vocab_size, SEARCHED
        elif top_p == SEARCHED or (joint and top_k):
            top_k, top_p = usual_length, SEARCHED
        elif top_k:
            top_p = IN_LIST
        return self._extend((top_k, top_p), edits=is_full, reports=is_full, logprob_counts=logprob_counts)

    @property
    def is_full(self) -> bool:
        """Whether a merged branch includes everything that few requests use."""
        return self.edited and self.reported

    @property
    def is_rarest(self) -> bool:
        """Whether the branch is full, and returns more log-probabilities than most servers allow."""
        return self.is_full and self.num_logprobs > USUAL_LOGPROBS

    @classmethod
    def iter_all(cls, vocab_size: int, logprob_counts: tuple[int, ...]) -> Iterator[Branch]:
        """Yield every branch of any batch."""
        lists = [size for size in TOP_K_LISTS if size < vocab_size]
        filters = [(0, 0), (0, SEARCHED), (vocab_size, SEARCHED), (vocab_size, 0)]
        filters += [(size, mass) for size in lists for mass in (0, IN_LIST, SEARCHED)]
        choices = [(False, False, 0, 0), *((True, m, *f) for m in (False, True) for f in filters)]
        reports = [(False, 0), *((True, count) for count in logprob_counts)]
        for choice, edits in product(choices, product((False, True), repeat=4)):
            for scored, report in product((0, *SCORED_COUNTS), reports):
                yield cls._make((*choice, *edits, scored, *report))


def usual_list_length(vocab_size: int) -> int:
    """Return the list length that covers most values of top-k; 0 if it would cover the whole vocabulary."""
    return _USUAL_TOP_K if vocab_size > _USUAL_TOP_K else 0


def select_coarse_counts(logprob_counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the log-probability counts from the usual maximum up to the configured one."""
    return tuple(count for count in logprob_counts if count >= USUAL_LOGPROBS) or logprob_counts[-1:]


def fit_size(sizes: tuple[int, ...], needed: int) -> int:
    """Return the smallest size that is at least `needed`; 0 if `needed` is 0."""
    return next((size for size in sizes if size >= needed), needed) if needed else 0

"""Sampling branches: combinations of sampling features, few enough to capture or compile a graph for each one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

# Sizes that depend on a request come from fixed lists, so that no request creates a new shape.
_USUAL_TOP_K = 64
TOP_K_LISTS = (_USUAL_TOP_K, 1024)
SCORED_COUNTS = (8, 32, 128)
USUAL_LOGPROBS = 20
IN_LIST, SEARCHED = 1, 2


class Branch(NamedTuple):
    """The sampling features that a batch needs. Each field is the maximum over the requests in the batch.

    Devices with graphs have fewer branches, as defined by `coarsen` for captured graphs and `merge` for compiled ones.
    """

    random: bool = False
    min_p: bool = False
    top_k: int = 0
    """Length of the list of largest logits that covers every request's k, or the vocabulary size if none does."""
    top_p: int = 0
    """`IN_LIST` to apply top-p within that list, or `SEARCHED` to search the whole vocabulary."""
    edited: bool = False
    """Whether any request has logit edits or a thinking budget."""
    constrained: bool = False
    """Whether any request has a grammar."""
    masked: bool = False
    """Whether any request restricts sampling to a set of allowed tokens."""
    penalized: bool = False
    scored: int = 0
    """Maximum number of token IDs for which a request asks for log-probabilities."""
    reported: bool = False
    """Whether any request asks for the log-probability of the sampled token."""
    num_logprobs: int = 0
    """Number of most likely tokens whose log-probabilities are also reported."""

    @classmethod
    def largest(cls, branches_BF: np.ndarray) -> Branch:
        """Return the field-wise maximum of branches given as rows of integers, where 0 means that a field is not
        set."""
        if not branches_BF.any():
            return cls()
        values = branches_BF.max(axis=0).tolist()
        return cls._make(type(none)(value) for none, value in zip(cls(), values, strict=True))

    def select_drafting(self, mode: str) -> Branch:
        """Return the features that drafting needs: none if it is greedy; otherwise, noise and filters."""
        if mode == "greedy":
            return Branch()
        return Branch(random=self.random, min_p=self.min_p, top_k=self.top_k, top_p=self.top_p)

    def select_reports(self) -> Branch:
        """Return the fields that determine what is reported to the host in addition to tokens."""
        return Branch(scored=self.scored, reported=self.reported, num_logprobs=self.num_logprobs)

    def coarsen(self, vocab_size: int, logprob_counts: tuple[int, ...]) -> Branch:
        """Return a branch that covers this one, from a set so small that every branch in it can be captured.

        Features that are not used get neutral values, so that results do not change.
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
        """Return a branch with these filters, with all logit edits or none, and with all reports or none."""
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
        """Return a branch that covers this one, from an even smaller set, in which every branch can be compiled.

        Common features have their own branches: argmax, noise, a short list for top-k, and a search for top-p. All
        others share the `full` branches: logit edits, penalties, masks, log-probabilities, and larger values of top-k.

        Args:
            joint: Whether to use an even smaller set. Rules that read all positions of a row together require it,
                because they need separate graphs for verify steps that sample.
        """
        usual_length = usual_list_length(vocab_size)
        is_full = any(self._replace(random=False, min_p=False, top_k=0, top_p=0)) or self.top_k > usual_length
        top_k, top_p = self.top_k, self.top_p
        # To limit the number of full branches, those that sample always include all filters.
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
        """Whether a merged branch includes all rarely used features."""
        return self.edited and self.reported

    @property
    def is_rarest(self) -> bool:
        """Whether the branch is full and returns more log-probabilities than most servers allow."""
        return self.is_full and self.num_logprobs > USUAL_LOGPROBS

    @classmethod
    def iter_all(cls, vocab_size: int, logprob_counts: tuple[int, ...]) -> Iterator[Branch]:
        """Yield every branch that a batch may need."""
        lists = [size for size in TOP_K_LISTS if size < vocab_size]
        filters = [(0, 0), (0, SEARCHED), (vocab_size, SEARCHED), (vocab_size, 0)]
        filters += [(size, mass) for size in lists for mass in (0, IN_LIST, SEARCHED)]
        choices = [(False, False, 0, 0), *((True, m, *f) for m in (False, True) for f in filters)]
        reports = [(False, 0), *((True, count) for count in logprob_counts)]
        for choice, edits in product(choices, product((False, True), repeat=4)):
            for scored, report in product((0, *SCORED_COUNTS), reports):
                yield cls._make((*choice, *edits, scored, *report))


def usual_list_length(vocab_size: int) -> int:
    """Return the list length that covers most values of top-k, or 0 if it would cover the whole vocabulary."""
    return _USUAL_TOP_K if vocab_size > _USUAL_TOP_K else 0


def select_coarse_counts(logprob_counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers of log-probabilities from the usual maximum to the configured maximum."""
    return tuple(count for count in logprob_counts if count >= USUAL_LOGPROBS) or logprob_counts[-1:]


def fit_size(sizes: tuple[int, ...], needed: int) -> int:
    return next((size for size in sizes if size >= needed), needed) if needed else 0

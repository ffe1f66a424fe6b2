"""Distributions that block drafters draw from: those that a dense computation gives, and those that are kept."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.distributions import ALPHA, cells, p_value, request_keys
from vllm_gaudi_spec.drafting.block import (
    BlockProposer,
    Scores,
    score_by_previous,
    score_candidates,
    score_independently,
)
from vllm_gaudi_spec.drafting.vocabulary import SameVocabulary
from vllm_gaudi_spec.records import Drafts
from vllm_gaudi_spec.sampling.drafts import draft
from vllm_gaudi_spec.sampling.rules.registry import TORCH

VOCAB, NUM_DRAFTS, CANDIDATES = 4, 3, 3
ROWS = 50_000
every_kind = pytest.mark.parametrize("kind", ["independent", "markov", "candidates"])


class HandMade(BlockProposer):
    """A block drafter whose hidden states, given by context and place, are its logits before any pair is scored."""

    def __init__(self, kind: str) -> None:
        model: Any = SimpleNamespace(
            group=None, logits=lambda hidden: hidden, counting_rows=lambda is_real_B: nullcontext()
        )
        super().__init__(model, SameVocabulary(VOCAB, VOCAB), VOCAB, mask_token=0, block_size=1 + NUM_DRAFTS)
        generator = torch.Generator().manual_seed(3)
        self._kind = kind
        self._logits_CKV = 1.5 * torch.randn(VOCAB, NUM_DRAFTS, VOCAB, generator=generator)
        self._pairs_VV = 1.5 * torch.randn(VOCAB, VOCAB, generator=generator)
        """Scores of a token after another one."""

    def draft(self, context_N: np.ndarray, keys_N2: torch.Tensor, starts_N: torch.Tensor) -> Drafts:
        self._newest_N = torch.from_numpy(context_N).int()  # contexts are single tokens here

        def choose(logits_NV: torch.Tensor, before: int) -> Any:
            ones_N = torch.ones(len(logits_NV))
            return draft(TORCH, logits_NV, "probabilistic", ones_N, keys_N2, starts_N + before, starts_N)

        most_N = torch.full((len(context_N),), NUM_DRAFTS, dtype=torch.int32)
        request: Any = SimpleNamespace(choose=choose, num_drafts=NUM_DRAFTS, max_drafts_B=most_N)
        return self.propose(request)

    def _fill_block(self, request: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self._newest_N, self._logits_CKV[self._newest_N.long()]

    def _make_scores(self, newest_B: torch.Tensor, hidden_BKH: torch.Tensor, is_drafting_B: torch.Tensor) -> Scores:
        model: Any = self._model
        if self._kind == "candidates":
            model.compute_candidates = lambda hidden: hidden.topk(CANDIDATES)
            model.model = SimpleNamespace(model=SimpleNamespace(candidate_selector=self._select))
            return score_candidates(model, VOCAB, hidden_BKH, newest_B, is_drafting_B)
        if self._kind == "markov":
            model.model = SimpleNamespace(
                markov_embed=lambda tokens: tokens.long(), markov_bias=lambda rows: self._pairs_VV[rows]
            )
            return score_by_previous(model, self._translation, hidden_BKH, is_drafting_B)
        return score_independently(model, self._translation, hidden_BKH)

    def _select(
        self, ids_BKC: torch.Tensor, logits_BKC: torch.Tensor, hidden_BKH: torch.Tensor, newest_B: torch.Tensor
    ) -> torch.Tensor:
        first_B1C = newest_B[:, None, None].expand(-1, 1, CANDIDATES)
        before_BKC = torch.cat((first_B1C, ids_BKC[:, :-1]), dim=1)
        return logits_BKC[:, :, None] + self._pairs_VV[before_BKC[..., None], ids_BKC[:, :, None]]

    def probs(self, context: int, place: int, previous: int) -> torch.Tensor:
        """Return the distribution of a draft token as the definition of its method has it."""
        logits_V = self._logits_CKV[context, place]
        scores_V = logits_V if self._kind == "independent" else logits_V + self._pairs_VV[previous]
        if self._kind == "candidates":
            left_out = logits_V.argsort(descending=True)[CANDIDATES:]
            scores_V = scores_V.index_fill(0, left_out, -torch.inf)
        return scores_V.softmax(-1)


@every_kind
def test_blocks_are_drawn_from_the_kept_probabilities(kind: str) -> None:
    """Both are those of the definition, in which each draft follows the one before it. Any rule is exact then.

    The negative control takes the newest token for the one before each draft.
    """
    drafter, context = HandMade(kind), 1
    starts_N = torch.full((ROWS,), 9, dtype=torch.int32)
    drafts = drafter.draft(np.full(ROWS, context), request_keys(0, ROWS), starts_N)
    drawn_NK = drafts.tokens_BK.long()
    for place in range(NUM_DRAFTS):
        expected_VV = torch.stack([drafter.probs(context, place, previous) for previous in range(VOCAB)])
        previous_N = drawn_NK[:, place - 1] if place else torch.full((ROWS,), context)
        torch.testing.assert_close(drafts.probs_BKV[:, place], expected_VV[previous_N])

    def block_probs(follows_draft: bool) -> np.ndarray:
        probs_VVV = torch.empty(VOCAB, VOCAB, VOCAB)
        first_V = drafter.probs(context, 0, context)
        for one in range(VOCAB):
            second_V = drafter.probs(context, 1, one if follows_draft else context)
            for two in range(VOCAB):
                third_V = drafter.probs(context, 2, two if follows_draft else context)
                probs_VVV[one, two] = first_V[one] * second_V[two] * third_V
        return probs_VVV.flatten().double().numpy()

    drawn = cells(drawn_NK.numpy(), VOCAB)
    assert p_value(drawn, block_probs(follows_draft=True)) > ALPHA
    if kind != "independent":
        assert p_value(drawn, block_probs(follows_draft=False)) < ALPHA

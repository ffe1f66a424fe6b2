"""EAGLE, EAGLE-3 and MTP: a head that reads the target's hidden states, each beside the token that follows it.

At position p it reads token p + 1 and what the target says behind token p, keeps its KV there, and its answer is a
guess at what the target will say behind token p + 1: the next draft follows from it, and the step after that reads it
in the target's place. Whatever it wrote for drafts is written again, from the target's own states, once it is known
which were accepted (`drafting/head_reading.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_spec.drafting.draft_model import draft_behind
from vllm_gaudi_spec.drafting.vocabulary import FewerTokens, SameTokens

if TYPE_CHECKING:
    from vllm_gaudi_spec.drafting.base import Model
    from vllm_gaudi_spec.drafting.proposers import ProposerContext
    from vllm_gaudi_spec.drafting.vocabulary import Translation
    from vllm_gaudi_spec.records import DraftRequest, Drafts


class HeadProposer:
    def __init__(self, model: Model, translation: Translation) -> None:
        self._model = model
        self._translation = translation

    @classmethod
    def build(cls, context: ProposerContext) -> HeadProposer:
        assert context.model is not None
        return cls(context.model, translation_of(context.model, context.vocab_size))

    def propose(self, request: DraftRequest) -> Drafts:
        assert request.hidden is not None
        # The newest token stands beside the state before it, so a head is one position behind the target.
        starts_B = request.lengths_B - 1
        return draft_behind(self._model, self._translation, request, request.hidden, starts_B)


def translation_of(head: Model, vocab_size: int) -> Translation:
    """A head reads the target's tokens, and may have logits of fewer."""
    return SameTokens(vocab_size, vocab_size) if head.said is None else FewerTokens(head.said, vocab_size)

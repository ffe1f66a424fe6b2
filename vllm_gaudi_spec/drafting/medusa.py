"""Medusa: one head per draft token, all on the target's newest hidden state. There is no loop and no KV."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, cast

from vllm_gaudi_spec.drafting.draft_model import stack_drafts
from vllm_gaudi_spec.drafting.head import make_head_translation

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_spec.drafting.proposers import ProposerContext
    from vllm_gaudi_spec.drafting.vocabulary import Translation
    from vllm_gaudi_spec.records import DraftRequest, Drafts


class Heads(Protocol):
    def compute_head_logits(self, hidden_BH: torch.Tensor, max_drafts_B: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the logits of each head, [B, U]. Rows that request no drafts are padding."""
        ...


class MedusaProposer:
    def __init__(self, model: Heads, translation: Translation) -> None:
        self._heads = model
        self._translation = translation

    @classmethod
    def build(cls, context: ProposerContext) -> MedusaProposer:
        assert context.model is not None
        return cls(cast(Heads, context.model), make_head_translation(context.model, context.vocab_size))

    def propose(self, request: DraftRequest) -> Drafts:
        assert request.hidden is not None
        logits = self._heads.compute_head_logits(request.hidden.last, request.max_drafts_B)
        drafted = [
            request.choose(self._translation.to_target(logits_BU), index)
            for index, logits_BU in zip(range(request.num_drafts), logits, strict=False)
        ]
        return stack_drafts(drafted, request.max_drafts_B)

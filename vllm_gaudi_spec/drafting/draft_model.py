"""A drafter that is a model: k steps of it behind each verification, as one loop of static shapes.

Its KV stands beside the target's, in the same blocks, and is written with every prompt chunk. A draft's own KV is
written when the next one is drafted, so the last of k has none; if all were accepted, two tokens are new to the drafter
then. The first call of a round therefore always takes the two newest tokens, and at times writes the same KV again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.attention.inputs import rectangle
from vllm_gaudi_spec.drafting.universal.pairs import same_tokens
from vllm_gaudi_spec.records import DraftRequest, Drafts, Hidden

if TYPE_CHECKING:
    from vllm_gaudi_spec.attention.inputs import Blocks, Inputs
    from vllm_gaudi_spec.drafting.base import Model
    from vllm_gaudi_spec.drafting.proposers import ProposerContext
    from vllm_gaudi_spec.drafting.vocabulary import Translation
    from vllm_gaudi_spec.records import Drafted

NUM_NEWEST = 2
"""Tokens that the first call takes."""


class AutoregressiveProposer:
    def __init__(self, model: Model, translation: Translation) -> None:
        self._model = model
        self._translation = translation

    @classmethod
    def build(cls, context: ProposerContext) -> AutoregressiveProposer:
        assert context.model is not None
        if context.pair is not None:
            return cls(context.model, context.pair.mapped(context.device))
        return cls(context.model, same_tokens(context.vllm_config))

    def read(self, chunk: Inputs) -> None:
        """Tokens of the target's, a prompt chunk say."""
        self._model.forward(replace(chunk, token_ids_T=self._translation.to_drafter(chunk.token_ids_T)))

    def propose(self, request: DraftRequest) -> Drafts:
        return draft_behind(self._model, self._translation, request, self._read_newest(request), request.lengths_B)

    def _read_newest(self, request: DraftRequest) -> Hidden:
        """Behind each row's newest token."""
        drafts_B = request.num_wanted_B > 0
        first_B = torch.where(drafts_B, request.lengths_B - NUM_NEWEST, 0)
        place = torch.arange(NUM_NEWEST, dtype=torch.int32, device=first_B.device)
        index = request.rows_B[:, None] * request.history_RM.shape[1] + first_B[:, None] + place
        tokens_BN = request.history_RM.view(-1).index_select(0, index.flatten()).view(index.shape)
        num_real_B = drafts_B.int() * NUM_NEWEST
        hidden = forward(self._model, self._translation.to_drafter(tokens_BN), first_B, num_real_B, request.blocks)
        return Hidden(hidden.last.view(*index.shape, -1).select(1, NUM_NEWEST - 1))


def draft_behind(
    model: Model, translation: Translation, request: DraftRequest, hidden: Hidden, starts_B: torch.Tensor
) -> Drafts:
    """The steps of a round, from the hidden states [B, H] that the first draft follows from. `starts_B`: where that
    draft stands in the drafter's own count, which need not be the target's."""
    wanted_B = request.num_wanted_B
    drafted: list[Drafted] = []
    for place in range(request.num_drafts):
        if place:
            goes_on_B = (wanted_B > place).int()
            tokens_B1 = translation.to_drafter(drafted[-1].tokens_B[:, None])
            step = starts_B + place - 1
            hidden = forward(model, tokens_B1, step, goes_on_B, request.blocks, hidden.carried)
        logits_BV = translation.to_target(model.logits(hidden.last))
        drafted.append(request.choose(logits_BV, request.lengths_B - 1 + place))
    return gathered(drafted, wanted_B)


def gathered(drafted: list[Drafted], wanted_B: torch.Tensor) -> Drafts:
    """The places of a round, side by side."""
    probs = [draft.probs_BV for draft in drafted if draft.probs_BV is not None]
    sound = [draft.sound_B for draft in drafted if draft.sound_B is not None]
    return Drafts(
        torch.stack([draft.tokens_B for draft in drafted], dim=1),
        wanted_B,
        torch.stack(probs, dim=1) if probs else None,
        torch.stack(sound, dim=1) if sound else None,
    )


def forward(
    model: Model,
    tokens_BN: torch.Tensor,
    starts_B: torch.Tensor,
    num_real_B: torch.Tensor,
    blocks: Blocks,
    carried: torch.Tensor | None = None,
) -> Hidden:
    """[B * N, H]. A row that has no token here stands at position 0 and writes to the pad block."""
    starts_B = torch.where(num_real_B > 0, starts_B, 0)
    return model.forward(rectangle(tokens_BN, starts_B, num_real_B, blocks), carried)

"""Parallel drafting (PARD and P-EAGLE), which generates all draft tokens in one forward pass.

A drafter trained for parallel drafting predicts the first draft token from the newest token, and each later one from a
mask token in place of the preceding draft token. Draft tokens do not depend on each other, so the context determines
the distribution of each one, which is all that the acceptance rules require.

KV written for mask tokens is always overwritten before any later token attends to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from vllm_gaudi_spec.attention.metadata import build_rectangle
from vllm_gaudi_spec.drafting.draft_model import (
    AutoregressiveProposer,
    DraftModelKVSync,
    make_translation,
    stack_drafts,
)
from vllm_gaudi_spec.drafting.head import HeadProposer, make_head_translation

if TYPE_CHECKING:
    from vllm_gaudi_spec.drafting.base import DraftingContext, Model
    from vllm_gaudi_spec.drafting.models import LoadedHead
    from vllm_gaudi_spec.drafting.vocabulary import Translation
    from vllm_gaudi_spec.records import DraftRequest, Drafts
    from vllm_gaudi_spec.scheduling.limits import RowLimits


# --- draft models: PARD ---


class ParallelModelProposer(AutoregressiveProposer):
    """Drafts with a model that reads each row's unread tokens, followed by mask tokens.

    Accepted draft tokens count as unread, because the model has read mask tokens in their place. A row therefore has at
    most k + 1 unread tokens, and drafting takes one forward pass over [B, 2k] tokens.
    """

    drafts_one_by_one = False

    def __init__(self, model: Model, translation: Translation, mask_token: int) -> None:
        super().__init__(model, translation)
        self._mask_token = mask_token

    @classmethod
    def build(cls, context: DraftingContext) -> ParallelModelProposer:
        assert context.drafter is not None
        assert context.speculation.mask_token is not None
        return cls(context.drafter, make_translation(context), context.speculation.mask_token)

    def make_kv_sync(self, context: DraftingContext, row_limits: RowLimits) -> ParallelModelKVSync:
        self.kv_sync = ParallelModelKVSync(self.read, context)
        return self.kv_sync

    def propose(self, request: DraftRequest) -> Drafts:
        num_queries = 2 * request.num_drafts
        is_wanted_B = request.max_drafts_B > 0
        starts_B = torch.where(is_wanted_B, self.kv_sync.count_read(request.rows_B), 0)
        num_unread_B = torch.where(is_wanted_B, request.lengths_B - starts_B, 0)
        offsets_Q = torch.arange(num_queries, dtype=torch.int32, device=starts_B.device)
        tokens_BQ = torch.where(
            offsets_Q < num_unread_B[:, None],
            self._translation.to_drafter(_take_tokens(request, starts_B[:, None] + offsets_Q)),
            self._mask_token,
        ).int()
        num_real_B = num_unread_B + (request.max_drafts_B - 1).clamp(min=0)
        inputs = build_rectangle(tokens_BQ, starts_B, num_real_B, request.blocks, request.row_operations)
        hidden_TH = self._model.forward(inputs).last
        # Each draft token is predicted at the preceding position. For the first one, this is the newest token's.
        rows_B = torch.arange(len(starts_B), dtype=torch.int32, device=starts_B.device)
        newest_B = rows_B * num_queries + (num_unread_B - 1).clamp(min=0)
        index_KB = newest_B + offsets_Q[: request.num_drafts, None]
        return _choose_drafts(self._model, self._translation, request, hidden_TH.index_select(0, index_KB.flatten()))


def _take_tokens(request: DraftRequest, positions_BQ: torch.Tensor) -> torch.Tensor:
    """Return the tokens at these positions in the row histories, as int32 in the shape of `positions_BQ`."""
    width = request.history_RM.shape[1]
    index_BQ = request.rows_B[:, None] * width + positions_BQ.clamp(max=width - 1)
    return request.history_RM.view(-1).index_select(0, index_BQ.flatten()).view(index_BQ.shape)


class ParallelModelKVSync(DraftModelKVSync):
    """KV sync for a draft model that, while drafting, writes KV for the tokens of a row but not for draft tokens."""

    def count_read(self, rows_B: torch.Tensor) -> torch.Tensor:
        """Return the number of tokens that the drafter has read in each row, int32 [B]."""
        return self._reach_R.index_select(0, rows_B)

    def limit_drafts(self, rows_B: torch.Tensor, lengths_B: torch.Tensor, max_drafts_B: torch.Tensor) -> torch.Tensor:
        """Return `max_drafts_B`, with 0 for rows that have more unread tokens than a step can sample."""
        return torch.where(self.count_read(rows_B) >= lengths_B - (1 + self._num_drafts), max_drafts_B, 0)

    def on_round_written(self, rows_B: torch.Tensor, lengths_B: torch.Tensor, drafts: Drafts) -> None:
        """Include the newest tokens in the number of tokens that have KV."""
        self._put(rows_B, torch.where(drafts.num_drafts_B > 0, lengths_B, self.count_read(rows_B)))


# --- heads: P-EAGLE ---


class ParallelHeadProposer(HeadProposer):
    """Drafts with a head whose KV sync has already read each row's newest token, so only mask tokens are left.

    Each mask token is paired with a learned hidden state instead of the target's. Drafting takes one forward pass over
    [B, k - 1] tokens.
    """

    drafts_one_by_one = False

    def __init__(self, model: Model, translation: Translation, mask_token: int, mask_state_H: torch.Tensor) -> None:
        super().__init__(model, translation)
        self._mask_token = mask_token
        self._mask_state_H = mask_state_H

    @classmethod
    def build(cls, context: DraftingContext) -> ParallelHeadProposer:
        head = cast("LoadedHead", context.drafter)
        assert context.speculation.mask_token is not None
        translation = make_head_translation(head, context.vocab_size)
        return cls(head, translation, context.speculation.mask_token, head.compute_mask_state())

    def propose(self, request: DraftRequest) -> Drafts:
        assert request.hidden is not None
        states = [request.hidden.last]
        if request.num_drafts > 1:
            states += self._read_masks(request)
        return _choose_drafts(self._model, self._translation, request, torch.cat(states))

    def _read_masks(self, request: DraftRequest) -> tuple[torch.Tensor, ...]:
        """Return hidden states, [B, H], for each column of mask tokens."""
        shape = (len(request.rows_B), request.num_drafts - 1)
        num_masks_B = (request.max_drafts_B - 1).clamp(min=0)
        # The head's positions are one less than the target's, as in `HeadProposer.propose`.
        starts_B = torch.where(num_masks_B > 0, request.lengths_B - 1, 0)
        masks_BQ = torch.full(shape, self._mask_token, dtype=torch.int32, device=starts_B.device)
        inputs = build_rectangle(masks_BQ, starts_B, num_masks_B, request.blocks, request.row_operations)
        hidden = self._model.forward(inputs, self._mask_state_H.repeat(masks_BQ.numel(), 1))
        return hidden.last.view(*shape, -1).unbind(1)


# --- both ---


def _choose_drafts(model: Model, translation: Translation, request: DraftRequest, hidden_NH: torch.Tensor) -> Drafts:
    """Choose draft tokens from the hidden states that predict them.

    Args:
        hidden_NH: N = K * B hidden states: B for the first draft token, B for the second, and so on.
    """
    logits_NV = translation.to_target(model.logits(hidden_NH))
    by_position = logits_NV.split(len(request.rows_B))
    drafted = [request.choose(logits_BV, position) for position, logits_BV in enumerate(by_position)]
    return stack_drafts(drafted, request.max_drafts_B)

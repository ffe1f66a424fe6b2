"""Medusa, which has one head for each draft token. All heads use the target's newest hidden state and have no KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.drafting.base import DeviceProposer, DrafterKVSync
from vllm_gaudi_spec.drafting.draft_model import stack_drafts
from vllm_gaudi_spec.drafting.head import make_head_translation
from vllm_gaudi_spec.model import LoadedModel
from vllm_gaudi_spec.records import Hidden

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_gaudi_spec.drafting.base import DraftingContext
    from vllm_gaudi_spec.drafting.vocabulary import Translation
    from vllm_gaudi_spec.records import DraftRequest, Drafts
    from vllm_gaudi_spec.runner.hidden_states import HiddenStateBuffer
    from vllm_gaudi_spec.scheduling.limits import RowLimits


class LoadedMedusa(LoadedModel):
    def __init__(self, *args: Any, target: LoadedModel, **named: Any) -> None:
        """Load the heads, which share no modules with the target."""
        super().__init__(*args, **named)
        self.output_ids = self.model.token_map

    def compute_head_logits(self, hidden: torch.Tensor, max_drafts_B: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield each head's logits, [rows, U]. Rows in which no drafts are requested are padding."""
        with self.counting_rows(max_drafts_B > 0):
            for states, lm_head in zip(self.model(hidden), self.model.lm_heads, strict=True):
                with upstream.tensor_parallel_group(self.group):
                    logits = self.model.logits_processor(lm_head, states)
                yield logits


class StateKVSync(DrafterKVSync):
    """KV sync for drafters that have no KV and read the hidden state from which each row's newest token was sampled."""

    def __init__(self, hidden_states: HiddenStateBuffer) -> None:
        self._hidden_states = hidden_states

    def gather_hidden(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> Hidden:
        return Hidden(self._hidden_states.last_accepted(rows_B, lengths_B))


class MedusaProposer(DeviceProposer):
    def __init__(self, model: LoadedMedusa, translation: Translation) -> None:
        self._heads = model
        self._translation = translation

    @classmethod
    def build(cls, context: DraftingContext) -> MedusaProposer:
        model = cast(LoadedMedusa, context.drafter)
        return cls(model, make_head_translation(model, context.vocab_size))

    def make_kv_sync(self, context: DraftingContext, row_limits: RowLimits) -> StateKVSync:
        return StateKVSync(context.hidden_states)

    def propose(self, request: DraftRequest) -> Drafts:
        assert request.hidden is not None
        logits = self._heads.compute_head_logits(request.hidden.last, request.max_drafts_B)
        drafted = [
            request.choose(self._translation.to_target(logits_BU), index)
            for index, logits_BU in zip(range(request.num_drafts), logits, strict=False)
        ]
        return stack_drafts(drafted, request.max_drafts_B)

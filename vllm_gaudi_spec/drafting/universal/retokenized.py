"""A drafter that is a model and reads the target's text in its own tokens, at positions of its own.

Text is the host's business (`universal/timeline.py`); what is here works on the device, in static shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.drafting.draft_model import draft_behind, forward
from vllm_gaudi_spec.records import Hidden

if TYPE_CHECKING:
    from vllm_gaudi_spec.attention.inputs import Inputs
    from vllm_gaudi_spec.drafting.base import Model
    from vllm_gaudi_spec.drafting.vocabulary import Translation
    from vllm_gaudi_spec.records import DraftRequest, Drafts


@dataclass(frozen=True, slots=True)
class Unread:
    """What the drafter has still to read before it can draft; a row that does not draft has none."""

    tokens_BN: torch.Tensor
    """int32, the drafter's."""
    starts_B: torch.Tensor
    """int32: where the first stands in the drafter's count."""
    num_real_B: torch.Tensor
    """int32."""


class RetokenizedProposer:
    def __init__(self, model: Model, translation: Translation) -> None:
        self._model = model
        self._translation = translation

    def read(self, chunk: Inputs) -> None:
        """Of a text that is longer than a round reads."""
        self._model.forward(chunk)

    def propose(self, request: DraftRequest, unread: Unread) -> Drafts:
        rows, width = unread.tokens_BN.shape
        hidden = forward(self._model, unread.tokens_BN, unread.starts_B, unread.num_real_B, request.blocks)
        row_B = torch.arange(rows, dtype=torch.int32, device=unread.starts_B.device)
        last_BH = hidden.last.index_select(0, row_B * width + (unread.num_real_B - 1).clamp(min=0))
        ends_B = unread.starts_B + unread.num_real_B
        return draft_behind(self._model, self._translation, request, Hidden(last_BH), ends_B)

"""Translation between the target's vocabulary (size V) and the drafter's (size U)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from vllm_gaudi_spec.config import UnsupportedConfigError

if TYPE_CHECKING:
    import numpy as np


class Translation(Protocol):
    def to_drafter(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the drafter's token IDs for the given target IDs, as int32."""
        ...

    def to_target(self, logits_BU: torch.Tensor) -> torch.Tensor:
        """Return logits over the target's vocabulary, [B, V], with -inf for tokens that must not be drafted."""
        ...


class SameVocabulary:
    """Translation between identical vocabularies. The models' output matrices may be padded to different sizes."""

    def __init__(self, vocab_size: int, drafter_size: int) -> None:
        self._vocab_size = vocab_size
        self._largest = drafter_size - 1

    def to_drafter(self, tokens: torch.Tensor) -> torch.Tensor:
        # Prompts given as token IDs may contain padding IDs that the tokenizer does not have.
        return tokens.clamp(max=self._largest)

    def to_target(self, logits_BU: torch.Tensor) -> torch.Tensor:
        logits_BV = logits_BU[:, : self._vocab_size]
        missing = self._vocab_size - logits_BV.shape[1]
        return torch.nn.functional.pad(logits_BV, (0, missing), value=-torch.inf) if missing else logits_BV


class MappedVocabulary:
    """Translation by token ID. A target token without a match is never drafted, and `stand_in` is read in its place."""

    def __init__(self, target_to_draft: np.ndarray, draftable: np.ndarray, stand_in: int, device: torch.device) -> None:
        """Copy the map to the device. `draftable` is indexed by drafter IDs."""
        draft_V = torch.tensor(target_to_draft, device=device)
        matched_V = draft_V >= 0
        self._index_V = draft_V.clamp(min=0)
        self._read_V = torch.where(matched_V, draft_V, stand_in).int()
        self._draftable_V = matched_V & torch.tensor(draftable, device=device).index_select(0, self._index_V)

    def to_drafter(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._read_V.index_select(0, tokens.flatten()).view(tokens.shape)

    def to_target(self, logits_BU: torch.Tensor) -> torch.Tensor:
        return torch.where(self._draftable_V, logits_BU.index_select(1, self._index_V), -torch.inf)


class ReducedVocabulary:
    """Translation for a head that reads the target's vocabulary but predicts only part of it."""

    def __init__(self, output_ids: torch.Tensor, vocab_size: int) -> None:
        """Build the index. `output_ids` contains the target token IDs for which the head has logits."""
        ids_U = output_ids.cpu().long()
        if not ((ids_U >= 0) & (ids_U < vocab_size)).all():
            raise UnsupportedConfigError(
                f"The drafter predicts token ids outside of the target's vocabulary of {vocab_size} tokens; set a "
                "drafter made for this target in --speculative-config."
            )
        index_V = torch.full((vocab_size,), -1, dtype=torch.int64)
        index_V[ids_U] = torch.arange(len(ids_U))
        self._draftable_V = (index_V >= 0).to(output_ids.device)
        self._index_V = index_V.clamp(min=0).to(output_ids.device)

    def to_drafter(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens

    def to_target(self, logits_BU: torch.Tensor) -> torch.Tensor:
        return torch.where(self._draftable_V, logits_BU.index_select(1, self._index_V), -torch.inf)


class DrafterVocabulary:
    """Identity translation: drafts stay in the drafter's own vocabulary until the host converts them."""

    def __init__(self, draftable: np.ndarray, device: torch.device) -> None:
        """Copy the mask to the device. `draftable` is indexed by drafter IDs."""
        self._draftable_U = torch.tensor(draftable, device=device)

    def to_drafter(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens

    def to_target(self, logits_BU: torch.Tensor) -> torch.Tensor:
        return torch.where(self._draftable_U, logits_BU, -torch.inf)

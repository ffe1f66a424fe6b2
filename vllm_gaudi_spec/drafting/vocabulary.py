"""Between the target's tokens and the drafter's. V: the target's vocabulary, U: the drafter's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    import numpy as np


class Translation(Protocol):
    def to_drafter(self, tokens: torch.Tensor) -> torch.Tensor:
        """int32, of the target's ids: what the drafter reads in their place."""
        ...

    def to_target(self, logits_BU: torch.Tensor) -> torch.Tensor:
        """float32 [B, V]: -inf for ids that are not to be drafted."""
        ...


class SameTokens:
    """Equal ids mean equal tokens; output matrices may be padded, each model's to a size of its own."""

    def __init__(self, vocab_size: int, drafter_size: int) -> None:
        self._vocab_size = vocab_size
        self._largest = drafter_size - 1

    def to_drafter(self, tokens: torch.Tensor) -> torch.Tensor:
        # Beyond the tokenizer there is padding only, which a prompt of ids may hold all the same.
        return tokens.clamp(max=self._largest)

    def to_target(self, logits_BU: torch.Tensor) -> torch.Tensor:
        logits_BV = logits_BU[:, : self._vocab_size]
        missing = self._vocab_size - logits_BV.shape[1]
        return torch.nn.functional.pad(logits_BV, (0, missing), value=-torch.inf) if missing else logits_BV


class MappedTokens:
    """Id by id: a token without a partner is never drafted, and is read as `stand_in`."""

    def __init__(self, target_to_draft: np.ndarray, draftable: np.ndarray, stand_in: int, device: torch.device) -> None:
        """`draftable`: bool by the drafter's ids."""
        draft_V = torch.tensor(target_to_draft, device=device)
        matched_V = draft_V >= 0
        self._index_V = draft_V.clamp(min=0)
        self._read_V = torch.where(matched_V, draft_V, stand_in).int()
        self._said_V = matched_V & torch.tensor(draftable, device=device).index_select(0, self._index_V)

    def to_drafter(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._read_V.index_select(0, tokens.flatten()).view(tokens.shape)

    def to_target(self, logits_BU: torch.Tensor) -> torch.Tensor:
        return torch.where(self._said_V, logits_BU.index_select(1, self._index_V), -torch.inf)


class FewerTokens:
    """A head reads the target's tokens, and says only some of them."""

    def __init__(self, said: torch.Tensor, vocab_size: int) -> None:
        """`said`: the target's ids of what the head can say."""
        index_V = torch.full((vocab_size,), -1, dtype=torch.int64)
        index_V[said.cpu().long()] = torch.arange(len(said))
        self._said_V = (index_V >= 0).to(said.device)
        self._index_V = index_V.clamp(min=0).to(said.device)

    def to_drafter(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens

    def to_target(self, logits_BU: torch.Tensor) -> torch.Tensor:
        return torch.where(self._said_V, logits_BU.index_select(1, self._index_V), -torch.inf)


class OwnTokens:
    """No translation: the drafter says what it likes of its own tokens, for the host to write anew."""

    def __init__(self, sayable: np.ndarray, device: torch.device) -> None:
        """`sayable`: bool by the drafter's ids."""
        self._said_U = torch.tensor(sayable, device=device)

    def to_drafter(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens

    def to_target(self, logits_BU: torch.Tensor) -> torch.Tensor:
        return torch.where(self._said_U, logits_BU, -torch.inf)

"""N-gram drafting, which proposes the tokens that followed an earlier occurrence of the last tokens in the text.

The match is the most recent earlier occurrence of the longest repeated suffix with min_ngram to max_ngram tokens. A
match that is d tokens before the end suggests a period of d, so the drafts repeat the last d tokens. In a loop, the
most recent match is one period back, so the maximum number of tokens can be drafted. If a passage is repeated with
changes, its latest version is a better predictor than its first one.

Dimensions: B rows, K drafts, M tokens of history.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from vllm_gaudi_spec.drafting.base import DeviceProposer
from vllm_gaudi_spec.records import Context, DraftRequest, Drafts

if TYPE_CHECKING:
    from vllm_gaudi_spec.drafting.base import DraftingContext


class _Sized:
    """The range of n-gram lengths."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.min_ngram, self.max_ngram = min_ngram, max_ngram

    @classmethod
    def build(cls, context: DraftingContext) -> Self:
        return cls(context.spec_config.prompt_lookup_min, context.spec_config.prompt_lookup_max)


class NgramProposer(_Sized):
    def propose(self, contexts: list[Context]) -> list[Sequence[int]]:
        return [self._draft(context.tokens_np, context.max_drafts) for context in contexts]

    def forget(self, req_ids: Iterable[str]) -> None:
        """No-op: no state is kept."""

    num_remembered = 0

    def _draft(self, tokens_np: np.ndarray, max_drafts: int) -> list[int]:
        distance = self._find_distance(tokens_np)
        if distance == 0:
            return []
        drafts = tokens_np[tokens_np.size - distance :][:max_drafts].tolist()
        return (drafts * -(-max_drafts // distance))[:max_drafts]

    def _find_distance(self, tokens_np: np.ndarray) -> int:
        """Return the distance from the end of the match to the end of the text, or 0 if there is no match."""
        last = tokens_np.size - 1
        # matches_np[e]: whether the n-gram of the current length that ends at e equals the one at the end of the text.
        # Array operations take the same time for every text. Lists of candidates would be slow for text that loops.
        found = 0
        matches_np = np.ones(max(last, 0), dtype=bool)
        for back in range(min(self.max_ngram, last)):
            matches_np[:back] = False
            matches_np[back:] &= tokens_np[: last - back] == tokens_np[last - back]
            nearest = matches_np.tobytes().rfind(b"\1")  # several times faster than NumPy's search
            if nearest < 0:
                break
            if back + 1 >= self.min_ngram:
                found = last - nearest
        return found


class DeviceNgramProposer(_Sized, DeviceProposer):
    """N-gram drafting on the device, for all rows at once. The amount of work depends only on tensor shapes."""

    def propose(self, request: DraftRequest) -> Drafts:
        tokens_BM = request.history_RM.index_select(0, request.rows_B)
        lengths_B1 = request.lengths_B[:, None]
        distance_B1 = self._find_distance(tokens_BM, lengths_B1)
        found_B1 = distance_B1 > 0
        offsets_K = torch.arange(request.num_drafts, dtype=torch.int32, device=tokens_BM.device)
        # Rows without a match gather their first token, which is not used.
        index_BK = torch.where(found_B1, lengths_B1 - distance_B1 + offsets_K % distance_B1.clamp(min=1), 0)
        drafts_BK = tokens_BM.gather(1, index_BK.long())
        num_drafts_B = request.max_drafts_B * found_B1[:, 0]
        # In a row of length 0, even the first token is undefined.
        return Drafts(torch.where(offsets_K < num_drafts_B[:, None], drafts_BK, 0), num_drafts_B.int())

    def _find_distance(self, tokens_BM: torch.Tensor, lengths_B1: torch.Tensor) -> torch.Tensor:
        """Return the distance from the end of each row's match to the row's end, int32 [B, 1], or 0 without a match."""
        width = tokens_BM.shape[1]
        end_M = torch.arange(width, dtype=torch.int32, device=tokens_BM.device)
        matches_BM = end_M < lengths_B1 - 1
        size_BM = torch.zeros_like(tokens_BM)
        for back in range(min(self.max_ngram, width)):
            suffix_B1 = tokens_BM.gather(1, (lengths_B1 - 1 - back).clamp(min=0).long())
            # Compare the token at e - back for every end position e. The first `back` positions have no such token.
            same_BM = torch.nn.functional.pad(tokens_BM[:, : width - back] == suffix_B1, (back, 0))
            matches_BM = matches_BM & same_BM
            size_BM += matches_BM
        # A single maximum finds the longest match and, among matches of equal length, the most recent one.
        rank_BM = torch.where(size_BM >= self.min_ngram, size_BM * width + end_M, -1)
        best_B1 = rank_BM.amax(1, keepdim=True)
        return torch.where(best_B1 >= 0, lengths_B1 - 1 - best_B1 % width, 0)

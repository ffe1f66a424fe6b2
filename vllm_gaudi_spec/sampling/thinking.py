"""Thinking budgets, which force certain tokens once a request has used up its `thinking_token_budget`.

Forced tokens depend only on the tokens of the request, so no state has to be updated after verification. Each position
treats the draft tokens before it as if they had been sampled. This matches vLLM's second model runner.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NO_BUDGET = -1
_NO_TOKEN = -1
_FORCED_LOGIT = 1e9


class ThinkingMarkers(NamedTuple):
    """Token sequences that delimit a model's reasoning, from vLLM's `reasoning_config`."""

    start: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...]
    """Sequences that end the thinking phase."""
    forced: tuple[int, ...]
    """Sequence to force once the budget is used up."""

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> ThinkingMarkers | None:
        """Return the markers, or None if the server was started without any, in which case vLLM rejects budgets."""
        config = vllm_config.reasoning_config
        if config is None or not config.enabled:
            return None
        start, natural, forced = (
            tuple(ids or ())
            for ids in (
                config.reasoning_start_token_ids,
                config.natural_reasoning_end_token_ids,
                config.reasoning_end_token_ids,
            )
        )
        # A forced phrase without the model's own marker must also end the thinking phase, or it would be repeated.
        is_included = forced[-len(natural) :] == natural
        return cls(start, (natural,) if is_included else (natural, forced), forced)

    def find_forced_tokens(
        self, history_BM: torch.Tensor, positions_BQ: torch.Tensor, budget_B: torch.Tensor
    ) -> torch.Tensor:
        """Return the token that must follow each position, or -1, as int32 [B, Q].

        Args:
            history_BM: Tokens in each row, including drafts.
            positions_BQ: Consecutive positions in each row.
            budget_B: Maximum number of thinking tokens in each row, or `NO_BUDGET`.
        """
        recent_BQR = _gather_recent(history_BM, positions_BQ, max(map(len, (self.start, *self.ends, self.forced))))
        start_BQ, *end_BQ = (
            _find_last(marker, history_BM, positions_BQ, recent_BQR) for marker in (self.start, *self.ends)
        )
        num_thought_BQ = positions_BQ + 1 - (start_BQ + len(self.start))
        is_spent_BQ = (budget_B >= 0)[:, None] & (num_thought_BQ >= budget_B[:, None])
        is_thinking_BQ = start_BQ > reduce(torch.maximum, end_BQ)
        forced_BQ = torch.full_like(positions_BQ, self.forced[0])
        for length in range(1, len(self.forced)):
            continues_BQ = _ends_with(recent_BQR, self.forced[:length])
            forced_BQ = torch.where(continues_BQ, self.forced[length], forced_BQ)
        return torch.where(is_thinking_BQ & is_spent_BQ, forced_BQ, _NO_TOKEN)


def force_tokens(logits_BQV: torch.Tensor, forced_BQ: torch.Tensor) -> torch.Tensor:
    """Make each forced token the only token that can be sampled, even if it was masked."""
    token_V = torch.arange(logits_BQV.shape[-1], dtype=torch.int32, device=logits_BQV.device)
    return logits_BQV.masked_fill(token_V == forced_BQ[..., None], _FORCED_LOGIT)


def _gather_recent(history_BM: torch.Tensor, positions_BQ: torch.Tensor, length: int) -> torch.Tensor:
    """Return the last `length` tokens up to each position, int32 [B, Q, R], with -1 before the start of the text."""
    back_R = torch.arange(length - 1, -1, -1, dtype=torch.int32, device=history_BM.device)
    at_BQR = positions_BQ[..., None] - back_R
    tokens_BQR = history_BM.gather(1, at_BQR.clamp(min=0).flatten(1).long()).view(at_BQR.shape)
    return torch.where(at_BQR >= 0, tokens_BQR, _NO_TOKEN)


def _ends_with(recent_BQR: torch.Tensor, sequence: tuple[int, ...]) -> torch.Tensor:
    """Return whether the text up to each position ends with the sequence."""
    newest = recent_BQR.unbind(-1)[-len(sequence) :]
    return reduce(torch.logical_and, (token == other for token, other in zip(newest, sequence, strict=True)))


def _find_last(
    marker: tuple[int, ...], history_BM: torch.Tensor, positions_BQ: torch.Tensor, recent_BQR: torch.Tensor
) -> torch.Tensor:
    """Return the start of the last occurrence up to each position, or -1, as int32 [B, Q].

    The whole history is searched only once per row, for the first position.
    """
    size = len(marker)
    begin_M = torch.arange(history_BM.shape[1] + 1 - size, dtype=torch.int32, device=history_BM.device)
    matches_BM = begin_M <= positions_BQ[:, :1] + 1 - size
    for offset, token in enumerate(marker):
        matches_BM = matches_BM & (history_BM[:, offset : offset + len(begin_M)] == token)
    found_B1 = [torch.where(matches_BM, begin_M, -1).amax(1, keepdim=True)]
    newest_BQ = torch.where(_ends_with(recent_BQR, marker), positions_BQ + 1 - size, -1)
    for query in range(1, positions_BQ.shape[1]):
        found_B1.append(torch.maximum(found_B1[-1], newest_BQ[:, query : query + 1]))
    return torch.cat(found_B1, dim=1)

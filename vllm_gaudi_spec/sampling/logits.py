"""Applies the sampling parameters of a request to its logits at each of the Q positions in a verify step.

Dimensions: B rows, Q positions, V vocabulary size. All functions return new logits, with -inf for masked tokens.
Functions do not write to their input, which is a view of the output layer's result, because graphs on a Gaudi cannot
write through views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_gaudi_spec.sampling.logit_edits import ANY_TOKEN

if TYPE_CHECKING:
    from vllm_gaudi_spec.sampling.logit_edits import EditTables

NEG_INF = float("-inf")


class Penalties(NamedTuple):
    """The penalties of B rows, or of N listed positions."""

    presence_B: torch.Tensor
    frequency_B: torch.Tensor
    repetition_B: torch.Tensor


def apply_bitmask(logits_BQV: torch.Tensor, bitmask_BQW: torch.Tensor) -> torch.Tensor:
    """Mask tokens whose bit is 0. Bit t % 32 of int32 word t // 32 represents token t."""
    vocab = logits_BQV.shape[-1]
    token = torch.arange(vocab, device=logits_BQV.device)
    bits = bitmask_BQW.index_select(-1, token // 32)
    allowed = (bits >> (token % 32).int()) & 1
    return logits_BQV.masked_fill(allowed == 0, NEG_INF)


def apply_logit_edits(
    logits_BQV: torch.Tensor, tables: EditTables, recent_BQP: torch.Tensor, num_outputs_BQ: torch.Tensor
) -> torch.Tensor:
    """Add the bias of each edit to its token if the prefix matches and there are fewer than `until` output tokens.

    A negative `until` sets the same limit, but the edit is skipped at positions where it would mask every token.

    Args:
        recent_BQP: The output tokens to compare with prefix tokens.
    """
    token_BN, until_BN = tables.edits_B2N.unbind(1)
    prefix_BP, _, edit_BP = tables.prefix_B3P.unbind(1)
    differs_BQP = (recent_BQP != prefix_BP[:, None]) & (prefix_BP != ANY_TOKEN)[:, None]
    shape_BQN = (*num_outputs_BQ.shape, token_BN.shape[1])
    num_different_BQN = torch.zeros(shape_BQN, device=logits_BQV.device).scatter_add(
        -1, edit_BP[:, None].expand_as(recent_BQP).long(), differs_BQP.float()
    )
    active = (num_different_BQN == 0) & (num_outputs_BQ[..., None] < until_BN[:, None].abs())
    added = torch.where(active, tables.bias_BN[:, None], 0.0)
    index = token_BN[:, None].expand_as(added).long()
    yields = until_BN[:, None] < 0
    without_BQV = logits_BQV.scatter_add(-1, index, torch.where(yields, 0.0, added))
    with_BQV = without_BQV.scatter_add(-1, index, torch.where(yields, added, 0.0))
    return torch.where(with_BQV.amax(-1, keepdim=True) > NEG_INF, with_BQV, without_BQV)


def apply_penalties(
    logits_BQV: torch.Tensor,
    history_BM: torch.Tensor,
    prompt_len_B: torch.Tensor,
    positions_BQ: torch.Tensor,
    penalties_B: Penalties,
) -> torch.Tensor:
    """Apply presence and frequency penalties to output tokens, and the repetition penalty to prompt and output tokens.

    Each query counts the tokens up to its own position and treats draft tokens as if they had been sampled one by one.
    The positions of each row must be consecutive.
    """
    queries, vocab = logits_BQV.shape[1:]
    token_BM = history_BM.long()
    counts_BV, prompt_BV = _counts(token_BM, prompt_len_B, positions_BQ[:, 0], vocab)
    newest_BQ = history_BM.gather(1, positions_BQ.long()).long()  # a Gaudi cannot gather int64
    one = torch.ones_like(counts_BV[:, :1])
    penalized = []
    for q in range(queries):
        if q:
            counts_BV.scatter_add_(1, newest_BQ[:, q : q + 1], one)
        penalized.append(_penalize(logits_BQV[:, q], counts_BV, prompt_BV, penalties_B))
    return torch.stack(penalized, dim=1)


def apply_penalties_at(
    logits_NV: torch.Tensor,
    index_2N: torch.Tensor,
    history_BM: torch.Tensor,
    prompt_len_B: torch.Tensor,
    positions_BQ: torch.Tensor,
    penalties_N: Penalties,
) -> torch.Tensor:
    """Apply penalties to N positions. `index_2N` contains the row and query indices of the positions."""
    row_N, query_N = index_2N.unbind(0)
    token_BM = history_BM.long()
    counts_BV, prompt_BV = _counts(token_BM, prompt_len_B, positions_BQ[:, 0], logits_NV.shape[-1])
    # Count the tokens in each row's history once, and then add the drafts up to each position.
    counts_NV = counts_BV.index_select(0, row_N)
    draft_NQ = history_BM.gather(1, positions_BQ.long()).long().index_select(0, row_N)
    queries_Q = torch.arange(positions_BQ.shape[1], device=logits_NV.device)
    before_NQ = (queries_Q > 0) & (queries_Q <= query_N[:, None])
    counts_NV.scatter_add_(1, draft_NQ, before_NQ.float())
    return _penalize(logits_NV, counts_NV, prompt_BV.index_select(0, row_N), penalties_N)


def _penalize(
    logits_BV: torch.Tensor,
    counts_BV: torch.Tensor,
    prompt_BV: torch.Tensor,
    penalties_B: Penalties,
) -> torch.Tensor:
    """Apply all penalties.

    Args:
        counts_BV: How often each token occurs in the output.
        prompt_BV: Whether each token occurs in the prompt.
    """
    presence_B, frequency_B, repetition_B = penalties_B
    is_output = counts_BV > 0
    factor = torch.where(is_output | prompt_BV, repetition_B[:, None], 1.0)
    logits_BV = torch.where(logits_BV > 0, logits_BV / factor, logits_BV * factor)
    return logits_BV - frequency_B[:, None] * counts_BV - presence_B[:, None] * is_output


def _counts(
    token_BM: torch.Tensor, prompt_len_B: torch.Tensor, last_B: torch.Tensor, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how often each token occurs in the output up to `last_B` and whether it is in the prompt, both [B, V]."""
    offsets_M = torch.arange(token_BM.shape[1], device=token_BM.device)
    in_prompt = offsets_M < prompt_len_B[:, None]
    counts_BV = _count(token_BM, ~in_prompt & (offsets_M <= last_B[:, None]), vocab)
    return counts_BV, _count(token_BM, in_prompt, vocab) > 0


def _count(token_BM: torch.Tensor, which_BM: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return how often each token occurs at the selected positions, as float32 [B, V]."""
    counts = torch.zeros(token_BM.shape[0], vocab, device=token_BM.device)
    return counts.scatter_add_(1, token_BM, which_BM.float())


def apply_temperature(logits_BQV: torch.Tensor, temperature_B: torch.Tensor) -> torch.Tensor:
    """Divide logits by the temperature. Rows with temperature 0 are greedy and not changed."""
    scale = torch.where(temperature_B > 0, temperature_B, 1.0)
    return logits_BQV / scale[:, None, None]

"""Functions that acceptance rules use to compare drafts and to sample the token after the accepted drafts.

Dimensions: B rows, at most K drafts, Q = K + 1 positions, V vocabulary size. The distribution at position i is the
target's distribution for the token that draft i proposes. The position after a row's last draft is that of the bonus
token.

Only the first `num_drafts` of the K drafts in a row are real. The rules are exact if this number does not depend on the
excluded drafts: a drafter may stop before it samples a draft, but must not withdraw a draft because of its token.
"""

from __future__ import annotations

import torch

from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling.noise import Stream, gumbel

_LARGEST = torch.finfo(torch.float32).max


def mask_real_drafts(drafts_BK: torch.Tensor, num_drafts_B: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return which drafts may be accepted, bool [B, K]: the valid tokens among the first `num_drafts` of each row."""
    offsets_K = torch.arange(drafts_BK.shape[1], device=drafts_BK.device)
    return (offsets_K < num_drafts_B[:, None]) & (drafts_BK >= 0) & (drafts_BK < vocab)


def compute_ratios(
    probs_BKV: torch.Tensor, draft_probs_BKV: torch.Tensor, drafts_BK: torch.Tensor, num_drafts_B: torch.Tensor
) -> torch.Tensor:
    """Return the finite ratio p / q for each draft, or 0 for padding and for drafts whose draft probability is 0."""
    vocab = probs_BKV.shape[2]
    index = drafts_BK.clamp(0, vocab - 1).long()[..., None]
    p = probs_BKV.gather(2, index).squeeze(2)
    q = draft_probs_BKV.gather(2, index).squeeze(2)
    possible = mask_real_drafts(drafts_BK, num_drafts_B, vocab) & (q > 0)
    # Keep the ratio finite, because the block rule multiplies it by weights that can be 0.
    return torch.where(possible, p / q, 0.0).clamp_(max=_LARGEST)


def match_argmax(logits_BKV: torch.Tensor, drafts_BK: torch.Tensor, num_drafts_B: torch.Tensor) -> torch.Tensor:
    """Return 1 for each draft before the first mismatch with the target's argmax, then 0, as float32 [B, K]."""
    equal = logits_BKV.argmax(-1) == drafts_BK
    return (equal & mask_real_drafts(drafts_BK, num_drafts_B, logits_BKV.shape[2])).float().cumprod(-1)


def compute_residual(probs_BV: torch.Tensor, draft_probs_BV: torch.Tensor, weight_B: torch.Tensor) -> torch.Tensor:
    """Return max(w p - q, 0), not normalized: the part of the target's distribution that drafts do not cover."""
    return (weight_B[:, None] * probs_BV - draft_probs_BV).clamp_(min=0)


def select_position(values_BQV: torch.Tensor, index_B: torch.Tensor) -> torch.Tensor:
    """Return the values at the selected position in each row, [B, V]."""
    rows, queries = values_BQV.shape[:2]
    first = torch.arange(0, rows * queries, queries, device=values_BQV.device)
    return values_BQV.flatten(0, 1).index_select(0, first + index_B)


def sample_next(
    logits_BQV: torch.Tensor,
    draft_probs_BKV: torch.Tensor,
    num_drafts_B: torch.Tensor,
    num_accepted_B: torch.Tensor,
    weight_B: torch.Tensor,
    temperature_B: torch.Tensor,
    keys_B2: torch.Tensor,
    residual_keys_B2: torch.Tensor,
    positions_BQ: torch.Tensor,
) -> torch.Tensor:
    """Sample the token after the accepted drafts, int32 [B].

    After a rejection, this token is sampled from the residual. If all drafts were accepted, it is the bonus token,
    which is sampled from the target with the same noise as in ordinary decoding. Rows without drafts therefore get the
    same token as in ordinary decoding.
    """
    vocab = logits_BQV.shape[2]
    logits_BV = select_position(logits_BQV, num_accepted_B)
    draft_probs_BV = select_position(draft_probs_BKV, num_accepted_B.clamp(max=draft_probs_BKV.shape[1] - 1))
    residual_BV = compute_residual(logits_BV.softmax(-1), draft_probs_BV, weight_B)
    random_B = temperature_B > 0
    # If p = q, the residual is 0, and only a rounding error can cause a rejection.
    from_residual_B = (num_accepted_B < num_drafts_B) & random_B & (residual_BV.amax(-1) > 0)
    stream_B1 = torch.where(from_residual_B, int(Stream.RESIDUAL), int(Stream.TARGET)).int()[:, None]
    noise_keys_B2 = torch.where(from_residual_B[:, None], residual_keys_B2, keys_B2)
    position_B1 = positions_BQ.gather(1, num_accepted_B.long()[:, None])
    tokens_V = torch.arange(vocab, dtype=torch.int32, device=logits_BQV.device)
    # Only one position per row needs noise, so select its stream before computing noise for the whole vocabulary.
    noise_BV = gumbel(noise_keys_B2, position_B1, stream_B1, tokens_V).squeeze(1)
    chosen_BV = torch.where(from_residual_B[:, None], residual_BV.log(), logits_BV)
    return (noise_BV * random_B[:, None] + chosen_BV).argmax(-1).int()


def make_verification(
    drafts_BK: torch.Tensor, num_accepted_B: torch.Tensor, token_B: torch.Tensor, vocab: int
) -> Verification:
    """Combine the accepted drafts with the token that follows them. Unused entries also contain valid tokens."""
    offsets_Q = torch.arange(drafts_BK.shape[1] + 1, device=drafts_BK.device)
    tokens_BQ = torch.cat((drafts_BK.clamp(0, vocab - 1), token_B[:, None]), dim=1)
    tokens_BQ = torch.where(offsets_Q == num_accepted_B[:, None], token_B[:, None], tokens_BQ)
    return Verification(tokens_BQ=tokens_BQ, num_sampled_B=num_accepted_B + 1)

"""What the acceptance rules share: how a draft compares with the target, and the token after the accepted drafts.

B rows, K drafts at most, Q = K + 1 positions, V the vocabulary. Position i has the target's distribution of the token
that draft i proposes; the position after a row's last draft has that of the bonus token.

Of a row's K drafts the first `num_drafts` are real. The rules are exact as long as that number does not depend on the
drafts it leaves out: a drafter may stop before it draws a draft, but not withdraw one because of its token.
"""

from __future__ import annotations

import torch

from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling.noise import Stream, gumbel

_LARGEST = torch.finfo(torch.float32).max


def real_drafts(drafts_BK: torch.Tensor, num_drafts_B: torch.Tensor, vocab: int) -> torch.Tensor:
    """bool [B, K]: drafts that may be accepted: among a row's first `num_drafts`, and tokens of the vocabulary."""
    offsets_K = torch.arange(drafts_BK.shape[1], device=drafts_BK.device)
    return (offsets_K < num_drafts_B[:, None]) & (drafts_BK >= 0) & (drafts_BK < vocab)


def ratios(
    probs_BKV: torch.Tensor, draft_probs_BKV: torch.Tensor, drafts_BK: torch.Tensor, num_drafts_B: torch.Tensor
) -> torch.Tensor:
    """p / q of each draft, finite; 0 for drafts that are not real or whose draft probability is 0."""
    vocab = probs_BKV.shape[2]
    index = drafts_BK.clamp(0, vocab - 1).long()[..., None]
    p = probs_BKV.gather(2, index).squeeze(2)
    q = draft_probs_BKV.gather(2, index).squeeze(2)
    possible = real_drafts(drafts_BK, num_drafts_B, vocab) & (q > 0)
    # Finite: the block rule multiplies it by weights that can be 0.
    return torch.where(possible, p / q, 0.0).clamp_(max=_LARGEST)


def matches(logits_BKV: torch.Tensor, drafts_BK: torch.Tensor, num_drafts_B: torch.Tensor) -> torch.Tensor:
    """float32 [B, K]: 1 for drafts up to the first that is not the target's argmax, 0 from there on."""
    equal = logits_BKV.argmax(-1) == drafts_BK
    return (equal & real_drafts(drafts_BK, num_drafts_B, logits_BKV.shape[2])).float().cumprod(-1)


def residual(probs_BV: torch.Tensor, draft_probs_BV: torch.Tensor, weight_B: torch.Tensor) -> torch.Tensor:
    """max(w p - q, 0), not normalized: the mass of the target that accepted drafts do not provide."""
    return (weight_B[:, None] * probs_BV - draft_probs_BV).clamp_(min=0)


def at_index(values_BQV: torch.Tensor, index_B: torch.Tensor) -> torch.Tensor:
    """[B, V]: each row's values at one of its Q positions."""
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
    """int32 [B]: the token after the accepted drafts: recovered, from the residual, or when all drafts were accepted
    the bonus token, from the target.

    The bonus token uses the noise of ordinary decoding, so a row without drafts gets the token it would get there.
    """
    vocab = logits_BQV.shape[2]
    logits_BV = at_index(logits_BQV, num_accepted_B)
    draft_probs_BV = at_index(draft_probs_BKV, num_accepted_B.clamp(max=draft_probs_BKV.shape[1] - 1))
    residual_BV = residual(logits_BV.softmax(-1), draft_probs_BV, weight_B)
    random_B = temperature_B > 0
    # Where p = q the residual is 0, and only rounding can lead to a rejection.
    from_residual_B = (num_accepted_B < num_drafts_B) & random_B & (residual_BV.amax(-1) > 0)
    stream_B1 = torch.where(from_residual_B, int(Stream.RESIDUAL), int(Stream.TARGET)).int()[:, None]
    noise_keys_B2 = torch.where(from_residual_B[:, None], residual_keys_B2, keys_B2)
    position_B1 = positions_BQ.gather(1, num_accepted_B.long()[:, None])
    tokens_V = torch.arange(vocab, dtype=torch.int32, device=logits_BQV.device)
    # One position needs noise, not all Q: the row's stream is chosen before the vocabulary is spanned.
    noise_BV = gumbel(noise_keys_B2, position_B1, stream_B1, tokens_V).squeeze(1)
    chosen_BV = torch.where(from_residual_B[:, None], residual_BV.log(), logits_BV)
    return (noise_BV * random_B[:, None] + chosen_BV).argmax(-1).int()


def verification(
    drafts_BK: torch.Tensor, num_accepted_B: torch.Tensor, token_B: torch.Tensor, vocab: int
) -> Verification:
    """The accepted drafts and the token after them; all entries are tokens, also those that do not count."""
    offsets_Q = torch.arange(drafts_BK.shape[1] + 1, device=drafts_BK.device)
    tokens_BQ = torch.cat((drafts_BK.clamp(0, vocab - 1), token_B[:, None]), dim=1)
    tokens_BQ = torch.where(offsets_Q == num_accepted_B[:, None], token_B[:, None], tokens_BQ)
    return Verification(tokens_BQ=tokens_BQ, num_sampled_B=num_accepted_B + 1)

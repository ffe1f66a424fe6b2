"""Block verification (Sun et al., arXiv 2403.10444, algorithm 2): the drafts of a step are verified together.

Exact in distribution, and accepts at least as many drafts as the standard rule in expectation: a draft that is
likelier under the target than under the drafter makes up for one before it.
"""

from __future__ import annotations

import torch

from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling import stop
from vllm_gaudi_spec.sampling.noise import Stream, keys_of_block, uniform


def accept_probs(
    probs_BKV: torch.Tensor, draft_probs_BKV: torch.Tensor, drafts_BK: torch.Tensor, num_drafts_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The probability to accept the first i drafts when no longer prefix was accepted, [B, K]: the paper's h_1 to h_K.

    And the weight of the target at each position, [B, Q]: the paper's p_0 to p_K.
    """
    ratio_BK = stop.ratios(probs_BKV, draft_probs_BKV, drafts_BK, num_drafts_B)
    num_positions = drafts_BK.shape[1]
    weights = [torch.ones_like(ratio_BK[:, 0])]
    for index in range(num_positions):
        weights.append((weights[index] * ratio_BK[:, index]).clamp_(max=1))
    weights_BQ = torch.stack(weights, dim=1)
    # sum of max(w p - q, 0) at positions 0 to K - 1. Position 0 is not needed, but without it there would be no
    # position at all for K = 1.
    surplus_BK = (weights_BQ[:, :num_positions, None] * probs_BKV - draft_probs_BKV).clamp_(min=0).sum(-1)
    missing_BK = 1 - weights_BQ[:, :num_positions]
    # 0 / 0 where p = q after a prefix with all its weight: a longer prefix is accepted there for certain.
    inner_BK = torch.where(surplus_BK > 0, surplus_BK / (surplus_BK + missing_BK), 0.0)
    # h_i belongs to the prefix of i drafts and looks at position i, the one after it.
    lengths_K = torch.arange(1, num_positions + 1, device=drafts_BK.device)
    whole_BK = lengths_K == num_drafts_B[:, None]
    shorter_BK = lengths_K < num_drafts_B[:, None]
    inner_BK = torch.cat((inner_BK[:, 1:], torch.zeros_like(inner_BK[:, :1])), dim=1)
    accept_BK = torch.where(shorter_BK, inner_BK, torch.where(whole_BK, weights_BQ[:, 1:], 0.0))
    return accept_BK, weights_BQ


def verify(
    logits_BQV: torch.Tensor,
    draft_probs_BKV: torch.Tensor,
    drafts_BK: torch.Tensor,
    num_drafts_B: torch.Tensor,
    temperature_B: torch.Tensor,
    keys_B2: torch.Tensor,
    positions_BQ: torch.Tensor,
) -> Verification:
    """Accept the longest prefix of the drafts whose draw succeeds; a token from the residual of the target follows.

    Takes what `standard.verify` takes.
    """
    num_positions, vocab = drafts_BK.shape[1], logits_BQV.shape[2]
    logits_BKV = logits_BQV[:, :num_positions]
    accept_BK, weights_BQ = accept_probs(logits_BKV.softmax(-1), draft_probs_BKV, drafts_BK, num_drafts_B)
    matches_BK = stop.matches(logits_BKV, drafts_BK, num_drafts_B)
    accept_BK = torch.where((temperature_B > 0)[:, None], accept_BK, matches_BK)
    # Whether a row stops at a position depends on drafts and draws of later positions. Under keys of the position
    # alone the next step would use that noise again, and its tokens would depend on where this step stopped.
    block_keys_B2 = keys_of_block(keys_B2, positions_BQ[:, 0])
    accepted_BK = uniform(block_keys_B2, positions_BQ[:, :num_positions], Stream.ACCEPT) < accept_BK
    lengths_K = torch.arange(1, num_positions + 1, dtype=torch.int32, device=drafts_BK.device)
    num_accepted_B = (accepted_BK * lengths_K).amax(-1)
    token_B = stop.sample_next(
        logits_BQV,
        draft_probs_BKV,
        num_drafts_B,
        num_accepted_B,
        weights_BQ.gather(1, num_accepted_B.long()[:, None]).squeeze(1),
        temperature_B,
        keys_B2,
        block_keys_B2,
        positions_BQ,
    )
    return stop.verification(drafts_BK, num_accepted_B, token_B, vocab)

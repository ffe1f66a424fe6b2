"""Block verification (Sun et al., arXiv 2403.10444, algorithm 2), which verifies all drafts of a step together.

The rule is exact in distribution and, in expectation, accepts at least as many drafts as the standard rule: a draft
that is more likely under the target than under the drafter compensates for an earlier draft that is less likely.
"""

from __future__ import annotations

import torch

from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling import stop
from vllm_gaudi_spec.sampling.noise import Stream, derive_block_keys, uniform


def accept_probs(
    probs_BKV: torch.Tensor, draft_probs_BKV: torch.Tensor, drafts_BK: torch.Tensor, num_drafts_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return acceptance probabilities [B, K] and the target's weights [B, Q].

    The probabilities are h_1 to h_K in the paper: h_i is the probability of accepting the first i drafts if no longer
    prefix was accepted. The weights are p_0 to p_K in the paper.
    """
    ratio_BK = stop.compute_ratios(probs_BKV, draft_probs_BKV, drafts_BK, num_drafts_B)
    num_positions = drafts_BK.shape[1]
    weights = [torch.ones_like(ratio_BK[:, 0])]
    for index in range(num_positions):
        weights.append((weights[index] * ratio_BK[:, index]).clamp_(max=1))
    weights_BQ = torch.stack(weights, dim=1)
    # Sum max(w p - q, 0) at positions 0 to K - 1. Position 0 is not used but avoids an empty tensor for K = 1.
    surplus_BK = (weights_BQ[:, :num_positions, None] * probs_BKV - draft_probs_BKV).clamp_(min=0).sum(-1)
    missing_BK = 1 - weights_BQ[:, :num_positions]
    # If p = q after a prefix of weight 1, the quotient is 0 / 0, but a longer prefix is then certain to be accepted.
    inner_BK = torch.where(surplus_BK > 0, surplus_BK / (surplus_BK + missing_BK), 0.0)
    # h_i belongs to the prefix of i drafts and uses position i, which follows this prefix.
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
    """Accept the longest prefix of drafts whose random draw succeeds, and then sample from the target's residual.

    The arguments are the same as in `standard.verify`.
    """
    num_positions, vocab = drafts_BK.shape[1], logits_BQV.shape[2]
    logits_BKV = logits_BQV[:, :num_positions]
    accept_BK, weights_BQ = accept_probs(logits_BKV.softmax(-1), draft_probs_BKV, drafts_BK, num_drafts_B)
    matches_BK = stop.match_argmax(logits_BKV, drafts_BK, num_drafts_B)
    accept_BK = torch.where((temperature_B > 0)[:, None], accept_BK, matches_BK)
    # The position at which a row stops also depends on the drafts and the noise at later positions. If keys depended on
    # the position alone, the next step would reuse that noise, and its tokens would depend on where this step stopped.
    block_keys_B2 = derive_block_keys(keys_B2, positions_BQ[:, 0])
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
    return stop.make_verification(drafts_BK, num_accepted_B, token_B, vocab)

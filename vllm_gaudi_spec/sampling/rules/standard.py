"""The standard rule, which is rejection sampling with residual resampling (Leviathan et al., arXiv 2211.17192).

The output follows the target's distribution, regardless of the distribution from which drafts were sampled.
"""

from __future__ import annotations

import torch

from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling import stop
from vllm_gaudi_spec.sampling.noise import Stream, uniform


def accept_probs(
    probs_BKV: torch.Tensor, draft_probs_BKV: torch.Tensor, drafts_BK: torch.Tensor, num_drafts_B: torch.Tensor
) -> torch.Tensor:
    """Return min(1, p / q), float32 [B, K]: the probability of accepting each draft after all earlier ones."""
    return stop.compute_ratios(probs_BKV, draft_probs_BKV, drafts_BK, num_drafts_B).clamp_(max=1)


def verify(
    logits_BQV: torch.Tensor,
    draft_probs_BKV: torch.Tensor,
    drafts_BK: torch.Tensor,
    num_drafts_B: torch.Tensor,
    temperature_B: torch.Tensor,
    keys_B2: torch.Tensor,
    positions_BQ: torch.Tensor,
) -> Verification:
    """Accept the drafts before the first rejection, and then sample from the target's residual.

    Rows with temperature 0 accept drafts as long as they equal the argmax.

    Args:
        logits_BQV: The target's logits after temperature and filters.
        draft_probs_BKV: The distributions from which drafts were sampled.
    """
    num_positions, vocab = drafts_BK.shape[1], logits_BQV.shape[2]
    logits_BKV = logits_BQV[:, :num_positions]
    accept_BK = torch.where(
        (temperature_B > 0)[:, None],
        accept_probs(logits_BKV.softmax(-1), draft_probs_BKV, drafts_BK, num_drafts_B),
        stop.match_argmax(logits_BKV, drafts_BK, num_drafts_B),
    )
    # Keys may depend on the position alone, because whether a row stops at a position, and with which token, depends
    # only on noise up to that position. The next step starts at a later position, for which no noise has been used.
    accepted_BK = uniform(keys_B2, positions_BQ[:, :num_positions], Stream.ACCEPT) < accept_BK
    num_accepted_B = accepted_BK.int().cumprod(-1).sum(-1).int()
    token_B = stop.sample_next(
        logits_BQV,
        draft_probs_BKV,
        num_drafts_B,
        num_accepted_B,
        torch.ones_like(temperature_B),
        temperature_B,
        keys_B2,
        keys_B2,
        positions_BQ,
    )
    return stop.make_verification(drafts_BK, num_accepted_B, token_B, vocab)

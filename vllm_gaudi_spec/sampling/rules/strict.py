"""The strict rule, which samples from the target with noise keyed by position and accepts drafts that match.

The output is the same as without drafts, token for token. Without drafts, this is ordinary sampling.
"""

from __future__ import annotations

import torch

from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling.noise import Stream, gumbel


def sample_greedy(logits_BQV: torch.Tensor) -> torch.Tensor:
    return logits_BQV.argmax(-1).int()


def sample_random(
    logits_BQV: torch.Tensor,
    temperature_B: torch.Tensor,
    keys_B2: torch.Tensor,
    positions_BQ: torch.Tensor,
    stream: Stream = Stream.TARGET,
) -> torch.Tensor:
    """Sample each position from its logits. Rows with temperature 0 use the argmax."""
    tokens_V = torch.arange(logits_BQV.shape[-1], dtype=torch.int32, device=logits_BQV.device)
    noise = gumbel(keys_B2, positions_BQ, stream, tokens_V)
    noise.mul_((temperature_B > 0)[:, None, None])
    return noise.add_(logits_BQV).argmax(-1).int()


def verify(sampled_BQ: torch.Tensor, drafts_BK: torch.Tensor, num_drafts_B: torch.Tensor) -> Verification:
    """Accept the drafts before the first mismatch with the target's tokens, and then append the target's next token."""
    num_positions = drafts_BK.shape[1]
    offsets_K = torch.arange(num_positions, device=sampled_BQ.device)
    equal = (drafts_BK == sampled_BQ[:, :num_positions]) & (offsets_K < num_drafts_B[:, None])
    num_accepted = equal.int().cumprod(-1).sum(-1).int()
    return Verification(tokens_BQ=sampled_BQ, num_sampled_B=num_accepted + 1)


def verify_greedy(logits_BQV: torch.Tensor, drafts_BK: torch.Tensor, num_drafts_B: torch.Tensor) -> Verification:
    return verify(sample_greedy(logits_BQV), drafts_BK, num_drafts_B)


def verify_random(
    logits_BQV: torch.Tensor,
    drafts_BK: torch.Tensor,
    num_drafts_B: torch.Tensor,
    temperature_B: torch.Tensor,
    keys_B2: torch.Tensor,
    positions_BQ: torch.Tensor,
) -> Verification:
    return verify(sample_random(logits_BQV, temperature_B, keys_B2, positions_BQ), drafts_BK, num_drafts_B)

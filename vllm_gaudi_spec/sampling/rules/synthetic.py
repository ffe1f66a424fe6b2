"""The synthetic rule, which accepts drafts at given rates, regardless of the models' outputs.

Use this rule only for benchmarks, because its output does not follow the distribution of either model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling import stop
from vllm_gaudi_spec.sampling.noise import Stream, uniform

if TYPE_CHECKING:
    from vllm_gaudi_spec.sampling.rules.registry import Rules


def accept_probs(rates_K: torch.Tensor) -> torch.Tensor:
    """Return the acceptance rate of each draft if all earlier ones were accepted, float32 [K]. The values in `rates_K`
    never increase."""
    before_K = torch.cat((torch.ones_like(rates_K[:1]), rates_K[: rates_K.shape[0] - 1]))
    return torch.where(before_K > 0, rates_K / before_K, 0.0)


def verify(
    rules: Rules,
    logits_BQV: torch.Tensor,
    drafts_BK: torch.Tensor,
    num_drafts_B: torch.Tensor,
    rates_K: torch.Tensor,
    temperature_B: torch.Tensor,
    keys_B2: torch.Tensor,
    positions_BQ: torch.Tensor,
) -> Verification:
    """Accept draft i and all earlier ones with probability `rates_K[i]`, and then append the target's own token.

    A step may have fewer drafts than there are rates.
    """
    num_positions, vocab = drafts_BK.shape[1], logits_BQV.shape[2]
    drawn_BK = uniform(keys_B2, positions_BQ[:, :num_positions], Stream.ACCEPT) < accept_probs(rates_K[:num_positions])
    accepted_BK = drawn_BK & stop.mask_real_drafts(drafts_BK, num_drafts_B, vocab)
    num_accepted_B = accepted_BK.int().cumprod(-1).sum(-1).int()
    logits_BV = stop.select_position(logits_BQV, num_accepted_B)
    position_B1 = positions_BQ.gather(1, num_accepted_B.long()[:, None])
    token_B = rules.sample_random(logits_BV[:, None], temperature_B, keys_B2, position_B1).squeeze(1)
    return stop.make_verification(drafts_BK, num_accepted_B, token_B, vocab)

"""Choice of a draft model's next token. Dimensions: B rows; V, the size of the target's vocabulary."""

from __future__ import annotations

from typing import Literal

import torch

from vllm_gaudi_spec.records import Drafted
from vllm_gaudi_spec.sampling.noise import Stream, derive_block_keys
from vllm_gaudi_spec.sampling.rules.registry import Rules

SampledMode = Literal["probabilistic", "coupled"]
Mode = Literal["greedy"] | SampledMode


def draft_greedy(rules: Rules, logits_BV: torch.Tensor) -> Drafted:
    """Choose the argmax of the drafter's logits, which may have any dtype."""
    tokens_B, sound_B = rules.sound_argmax(logits_BV)
    return Drafted(tokens_B, None, sound_B)


def draft(
    rules: Rules,
    logits_BV: torch.Tensor,
    mode: SampledMode,
    temperature_B: torch.Tensor,
    keys_B2: torch.Tensor,
    positions_B: torch.Tensor,
    starts_B: torch.Tensor,
) -> Drafted:
    """Sample the token after `positions_B` from logits to which temperature and filters have already been applied.

    Rows with temperature 0 use the argmax.

    Args:
        starts_B: Position of the newest token that is not a draft, which is the first query of the next verify step.
    """
    logits_B1V, positions_B1 = logits_BV[:, None], positions_B[:, None]
    if mode == "coupled":
        # Use the target's noise for this position, so that similar distributions usually yield the same token.
        return Drafted(rules.sample_random(logits_B1V, temperature_B, keys_B2, positions_B1).squeeze(1), None)
    # The keys include the start position, because the position at which the block rule stops depends on drafts that it
    # rejects, so the next step must not reuse their noise. The standard rule is exact in either case.
    keys_B2 = derive_block_keys(keys_B2, starts_B)
    tokens_B = rules.sample_random(logits_B1V, temperature_B, keys_B2, positions_B1, Stream.DRAFT).squeeze(1)
    tokens_V = torch.arange(logits_BV.shape[1], dtype=torch.int32, device=logits_BV.device)
    one_hot_BV = (tokens_B[:, None] == tokens_V).float()
    # If all logits are -inf, there is no distribution, so the chosen token gets a one-hot distribution.
    has_probs_B1 = (temperature_B > 0)[:, None] & (logits_BV.amax(-1, keepdim=True) > -torch.inf)
    return Drafted(tokens_B, torch.where(has_probs_B1, logits_BV.softmax(-1), one_hot_BV))

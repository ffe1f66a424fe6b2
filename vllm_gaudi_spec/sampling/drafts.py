"""How a drafter that is a model chooses its next token. B rows, V the vocabulary of the target."""

from __future__ import annotations

from typing import Literal

import torch

from vllm_gaudi_spec.records import Drafted
from vllm_gaudi_spec.sampling.noise import Stream, keys_of_block
from vllm_gaudi_spec.sampling.rules.registry import Rules

SampledMode = Literal["probabilistic", "coupled"]
Mode = Literal["greedy"] | SampledMode


def draft_greedy(rules: Rules, logits_BV: torch.Tensor) -> Drafted:
    """Choose the argmax of the drafter's logits, which are in its own dtype."""
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
    """Sample the token after `positions_B` from the drafter's logits, to which temperature and filters were applied.

    `starts_B` is the position of the newest token that is no draft: the first query of the step that will verify.
    Rows with temperature 0 take their argmax.
    """
    logits_B1V, positions_B1 = logits_BV[:, None], positions_B[:, None]
    if mode == "coupled":
        # The same noise with which the target samples at this position: where the two distributions are close, the
        # tokens are mostly equal.
        return Drafted(rules.sample_random(logits_B1V, temperature_B, keys_B2, positions_B1).squeeze(1), None)
    # Keyed by the start as well: where the block rule stops depends on drafts that it does not accept, so the next
    # step may not draw from their noise again. The standard rule does not need this; it is exact either way.
    keys_B2 = keys_of_block(keys_B2, starts_B)
    tokens_B = rules.sample_random(logits_B1V, temperature_B, keys_B2, positions_B1, Stream.DRAFT).squeeze(1)
    tokens_V = torch.arange(logits_BV.shape[1], dtype=torch.int32, device=logits_BV.device)
    one_hot_BV = (tokens_B[:, None] == tokens_V).float()
    # Where all logits are -inf there is no distribution: the chosen token is proposed as one-hot.
    has_probs_B1 = (temperature_B > 0)[:, None] & (logits_BV.amax(-1, keepdim=True) > -torch.inf)
    return Drafted(tokens_B, torch.where(has_probs_B1, logits_BV.softmax(-1), one_hot_BV))

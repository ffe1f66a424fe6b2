"""How a drafter that is a model chooses its next token. B rows, V the vocabulary of the target."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from vllm_gaudi_spec.sample.noise import Stream, gumbel, keys_of_block
from vllm_gaudi_spec.sample.strict import sample_random

Mode = Literal["greedy", "probabilistic", "coupled"]


class Drafted(NamedTuple):
    tokens_B: torch.Tensor
    """int32."""
    probs_BV: torch.Tensor | None
    """float32: the law the tokens were drawn from; the probabilistic mode only."""


def draft(
    logits_BV: torch.Tensor,
    mode: Mode,
    temperature_B: torch.Tensor,
    keys_B2: torch.Tensor,
    positions_B: torch.Tensor,
    starts_B: torch.Tensor,
) -> Drafted:
    """Choose the token behind `positions_B` from the drafter's logits, temperature and filters done.

    `starts_B` is the position of the newest token that is no draft: the first query of the step that will verify.
    Rows with temperature 0 take their argmax in every mode.
    """
    if mode == "greedy":
        return Drafted(logits_BV.argmax(-1).int(), None)
    if mode == "coupled":
        # The very noise with which the target will sample at this position: where the two laws are close, so are
        # their tokens.
        return Drafted(sample_random(logits_BV[:, None], temperature_B, keys_B2, positions_B[:, None]).squeeze(1), None)
    tokens_V = torch.arange(logits_BV.shape[1], dtype=torch.int32, device=logits_BV.device)
    # Keyed by the start as well: where the block rule stops depends on drafts that it does not accept, so the next
    # step may not draw from their noise again. The standard rule does not need it, and does not mind.
    noise_BV = gumbel(keys_of_block(keys_B2, starts_B), positions_B[:, None], Stream.DRAFT, tokens_V).squeeze(1)
    random_B1 = (temperature_B > 0)[:, None]
    tokens_B = noise_BV.mul_(random_B1).add_(logits_BV).argmax(-1).int()
    one_hot_BV = (tokens_B[:, None] == tokens_V).float()
    # Where nothing may be drafted there is no law, and whatever was chosen is what is proposed.
    has_law_B1 = random_B1 & (logits_BV.amax(-1, keepdim=True) > -torch.inf)
    return Drafted(tokens_B, torch.where(has_law_B1, logits_BV.softmax(-1), one_hot_BV))

"""A device's implementations of the sampling functions that process whole vocabularies.

The functions in this folder are the reference implementations. If they launch too many kernels or read memory too
often, a device replaces some of them by name with functions that take the same arguments and return the same tokens.
Scores within 1e-4 of each other may swap ranks, and filters may differ within the tolerance given in
`sampling/filters.py`. For rows with NaN, a replacement only has to return valid tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import NamedTuple

import torch

from vllm_gaudi_spec.methods import RULES, STRICT
from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling import filters
from vllm_gaudi_spec.sampling.rules import strict


def _modules_verify() -> dict[str, Callable[..., Verification]]:
    return {name: import_module(f"{__package__}.{name}").verify for name in RULES if name != STRICT}


def _are_sound(logits_BV: torch.Tensor) -> torch.Tensor:
    """Return whether each row contains neither NaN nor +inf, bool [B]. This function reads the logits once.

    A row that contains only -inf is also valid, because all of its tokens are masked.
    """
    return logits_BV.sum(-1) < torch.inf


def _sound_argmax(logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits_BV = logits_BV.float()
    return strict.sample_greedy(logits_BV[:, None]).squeeze(1), _are_sound(logits_BV)


class Rules(NamedTuple):
    are_sound: Callable[[torch.Tensor], torch.Tensor] = _are_sound
    filter_logits: Callable[..., torch.Tensor] = filters.filter_logits
    sample_greedy: Callable[..., torch.Tensor] = strict.sample_greedy
    sample_random: Callable[..., torch.Tensor] = strict.sample_random
    sound_argmax: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = _sound_argmax
    """Takes logits [B, V] in any dtype. Returns the greedy tokens, int32 [B], and whether each row contains neither NaN
    nor +inf, bool [B]."""
    strict_greedy: Callable[..., Verification] = strict.verify_greedy
    strict_random: Callable[..., Verification] = strict.verify_random
    verify: Mapping[str, Callable[..., Verification]] = _modules_verify()
    """The other rules by name.

    Rules that need probabilities take the arguments of `standard.verify`. All other rules take those of
    `synthetic.verify`, but only the synthetic rule takes `rates_K`.
    """


TORCH = Rules()

"""Functions over whole vocabularies, for one device.

The functions of this folder are the reference. A device on which their launches or memory passes cost too much replaces
some by name, with the same arguments and tokens; scores within 1e-4 of each other may swap ranks, and filters may
differ within the tolerance of `sampling/filters.py`. Rows with NaN only need to return valid tokens.
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
    """Return whether rows have neither NaN nor +inf, bool [B], in one pass.

    A row of -inf is sound: it only forbids all tokens.
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
    """Return the greedy tokens, int32 [B], of logits [B, V] in any dtype, and whether each row is sound, bool [B]."""
    strict_greedy: Callable[..., Verification] = strict.verify_greedy
    strict_random: Callable[..., Verification] = strict.verify_random
    verify: Mapping[str, Callable[..., Verification]] = _modules_verify()
    """The other rules by name.

    Those that need probabilities are called like `standard.verify`, others like `synthetic.verify`; only the synthetic
    rule takes `rates_K`.
    """


TORCH = Rules()

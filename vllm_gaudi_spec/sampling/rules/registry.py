"""The functions that pass over whole vocabularies, as one device runs them.

Those of this folder are the reference. A device whose launches or passes over memory cost too much in them brings its
own, with the same arguments and the same tokens; scores within 1e-4 of each other may change places. Of a row with NaN
only that is promised that its token is one of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling.rules import block, standard, strict


class Rules(NamedTuple):
    sample_greedy: Callable[..., torch.Tensor] = strict.sample_greedy
    sample_random: Callable[..., torch.Tensor] = strict.sample_random
    strict_greedy: Callable[..., Verification] = strict.verify_greedy
    strict_random: Callable[..., Verification] = strict.verify_random
    standard: Callable[..., Verification] = standard.verify
    block: Callable[..., Verification] = block.verify


TORCH = Rules()

"""A rectangle's real tokens alone, for devices where nothing is compiled for a shape: a model then computes no padding.

T tokens of B rows with Q places each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.attention.metadata import Packed

if TYPE_CHECKING:
    from vllm_gaudi_spec.attention.inputs import Inputs


def packed(num_real_B: torch.Tensor, num_queries: int) -> Packed | None:
    """What is real of a rectangle. None where all of it is, or, as in warm-up, nothing."""
    place_Q = torch.arange(num_queries, dtype=torch.int32)
    index_T = (place_Q < num_real_B[:, None]).flatten().nonzero().flatten()
    if len(index_T) in (0, len(num_real_B) * num_queries):
        return None
    return Packed(index_T, num_real_B)


def pack(inputs: Inputs, kept: Packed) -> Inputs:
    index_T = kept.index_T
    return replace(
        inputs,
        token_ids_T=inputs.token_ids_T.index_select(0, index_T),
        positions_T=inputs.positions_T.index_select(0, index_T),
        slots=tuple(slots_T.index_select(0, index_T) for slots_T in inputs.slots),
        calls=tuple(replace(call, packed=kept, _plans={}) for call in inputs.calls),
        adapters_T=None if inputs.adapters_T is None else inputs.adapters_T.index_select(0, index_T),
    )


def spread(states: torch.Tensor, kept: Packed, num_positions: int) -> torch.Tensor:
    """States of real tokens at their places in the rectangle; zero where there is padding."""
    return states.new_zeros(num_positions, *states.shape[1:]).index_copy_(0, kept.index_T, states)

"""The real tokens of a rectangle, for devices that compile nothing per shape: the model then computes no padding.

T tokens of B rows with Q positions each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.attention.metadata import Packed

if TYPE_CHECKING:
    from vllm_gaudi_spec.attention.inputs import Inputs


def packed(num_real_B: torch.Tensor, num_queries: int) -> Packed | None:
    """The real tokens. None where all tokens are real, or, as in warm-up, none is."""
    offsets_Q = torch.arange(num_queries, dtype=torch.int32)
    index_T = (offsets_Q < num_real_B[:, None]).flatten().nonzero().flatten()
    if len(index_T) in (0, len(num_real_B) * num_queries):
        return None
    return Packed(index_T, num_real_B)


def pack(inputs: Inputs, packed: Packed) -> Inputs:
    index_T = packed.index_T
    return replace(
        inputs,
        token_ids_T=inputs.token_ids_T.index_select(0, index_T),
        positions_T=inputs.positions_T.index_select(0, index_T),
        slots=tuple(slots_T.index_select(0, index_T) for slots_T in inputs.slots),
        calls=tuple(replace(call, packed=packed, _plans={}) for call in inputs.calls),
        adapters_T=None if inputs.adapters_T is None else inputs.adapters_T.index_select(0, index_T),
    )


def spread(states: torch.Tensor, packed: Packed, num_positions: int) -> torch.Tensor:
    """States of real tokens at their positions in the rectangle; zero where there is padding."""
    return states.new_zeros(num_positions, *states.shape[1:]).index_copy_(0, packed.index_T, states)

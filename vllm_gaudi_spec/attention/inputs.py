"""Inputs of a model and its attention layers: a rectangle of tokens, their positions and their KV slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_gaudi_spec.attention.metadata import AttentionCall, FlatBlocks


@dataclass(frozen=True, slots=True)
class Inputs:
    """T = B * Q tokens, flat as vLLM's model classes take them."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    """int64 [T], one a KV cache group."""
    calls: tuple[AttentionCall, ...]
    num_real_B: torch.Tensor
    """int32: of each row, how many tokens are not padding."""
    adapters_T: torch.Tensor | None = None
    """int32: the slot of each token's LoRA adapter, where there are adapters."""

    def real_T(self) -> torch.Tensor:
        """bool [T]: which tokens are not padding."""
        call = self.calls[0]
        if call.packed is not None:
            return torch.ones_like(self.token_ids_T, dtype=torch.bool)
        offsets_Q = torch.arange(call.num_queries, dtype=torch.int32, device=self.num_real_B.device)
        return (offsets_Q < self.num_real_B[:, None]).flatten()


class Blocks(NamedTuple):
    """The KV blocks of a batch's rows, for each KV cache group."""

    tables: tuple[torch.Tensor, ...]
    """int32 [B, W]."""
    sizes: tuple[int, ...]
    """Tokens in a block."""
    flat: tuple[torch.Tensor, ...] = ()
    """int32 [3, N]: the same blocks in one list, as `FlatBlocks` has them; for devices that decode over such lists."""
    lengths_B: torch.Tensor | None = None
    """int32, on the host: an upper bound of each row's tokens of KV when the graph that reads this ends, whatever is in
    flight; for devices that read tables and need it."""


def rectangle(
    tokens_BQ: torch.Tensor,
    starts_B: torch.Tensor,
    num_real_B: torch.Tensor,
    blocks: Blocks,
) -> Inputs:
    """Rows of Q consecutive positions from `starts_B` on, of which the first `num_real_B` are real.

    Padding is token 0 at position 0, since rotary tables end at a model's last position, and writes to the pad block,
    block 0, which is never read.
    """
    rows, queries = tokens_BQ.shape
    offsets_Q = torch.arange(queries, dtype=torch.int32, device=tokens_BQ.device)
    positions_BQ = starts_B[:, None] + offsets_Q
    real_BQ = offsets_Q < num_real_B[:, None]
    slots, calls = [], []
    for group, (table, size) in enumerate(zip(blocks.tables, blocks.sizes, strict=True)):
        block_BQ = table.gather(1, (positions_BQ // size).long())
        slots.append((torch.where(real_BQ, block_BQ, 0) * size + positions_BQ % size).flatten().long())
        calls.append(
            AttentionCall(
                num_rows=rows,
                num_queries=queries,
                starts_B=starts_B,
                block_table_BW=table,
                flat=FlatBlocks(*blocks.flat[group].unbind(0)) if blocks.flat else None,
                host_lengths_B=blocks.lengths_B,
            )
        )
    tokens_BQ, positions_BQ = torch.where(real_BQ, tokens_BQ, 0), torch.where(real_BQ, positions_BQ, 0)
    return Inputs(tokens_BQ.flatten(), positions_BQ.flatten().long(), tuple(slots), tuple(calls), num_real_B)

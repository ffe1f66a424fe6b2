"""Splits prompt chunks into rows of equal length, so that prompts of any length can share a forward pass.

A chunk takes as many consecutive rows of the padded batch as it has slices. Every layer writes the keys of all rows
before any row attends, so each slice also attends to earlier slices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_gaudi_spec.records import Request


class Slice(NamedTuple):
    request: Request
    start: int
    """Position of the first token."""
    num_tokens: int


def cut_chunk(request: Request, count: int, size: int) -> Iterator[Slice]:
    """Yield the slices of a chunk of `count` tokens. Only the last slice may have fewer than `size` tokens."""
    for offset in range(0, count, size):
        yield Slice(request, request.num_computed + offset, min(size, count - offset))


def keep_last_slices(rows_B: torch.Tensor, pad_row: int) -> torch.Tensor:
    """Return `rows_B` with the pad row in place of every row that is continued by the next row.

    The result is the index for writing request state, because an index must not occur twice in such a write.
    """
    next_B = torch.cat([rows_B[1:], rows_B.new_full((1,), pad_row)])
    return torch.where(rows_B == next_B, pad_row, rows_B)


def count_before_slices(rows_B: torch.Tensor, starts_B: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens that precede each row in its chunk and in the same padded batch, int32 [B]."""
    is_same_BB = rows_B[:, None] == rows_B
    first_B = torch.where(is_same_BB, starts_B, starts_B[:, None]).amin(dim=1)
    return starts_B - first_B

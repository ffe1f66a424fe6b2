"""Per-row bookkeeping on the device: positions, slots, token histories and draft counts.

These reference implementations use many small torch operations. If launching these operations takes too long on a
device, the device replaces functions in `RowOperations` with kernels that return the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

# --- positions ---


class Positions(NamedTuple):
    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    """int64."""
    slots: tuple[torch.Tensor, ...]
    """int64 [T] for each KV cache group."""


def locate_rectangle(
    tokens_BQ: torch.Tensor,
    starts_B: torch.Tensor,
    num_real_B: torch.Tensor,
    tables: tuple[torch.Tensor, ...],
    sizes: tuple[int, ...],
) -> Positions:
    """Return a padded batch's flattened tokens, positions and slots. `metadata.build_rectangle` describes padding.

    `tables` and `sizes` are the fields of `Blocks`.
    """
    rows, queries = tokens_BQ.shape
    indices_BQ = torch.arange(rows * queries, dtype=torch.int32, device=tokens_BQ.device).view(rows, queries)
    offsets_Q = indices_BQ[0]
    everywhere_BQ = starts_B.unsqueeze(1) + offsets_Q
    real_BQ = offsets_Q < num_real_B.unsqueeze(1)
    # Padding positions may be past the end of the block table.
    positions_BQ = torch.where(real_BQ, everywhere_BQ, 0)
    slots = []
    for table_BW, size in zip(tables, sizes, strict=True):
        block_BQ = table_BW.gather(1, (positions_BQ // size).long())
        pads_BQ = indices_BQ if rows * queries <= size else indices_BQ % size
        slots_BQ = torch.where(real_BQ, block_BQ * size + everywhere_BQ % size, pads_BQ)
        slots.append(slots_BQ.flatten().long())
    tokens_BQ = torch.where(real_BQ, tokens_BQ, 0)
    return Positions(tokens_BQ.flatten(), positions_BQ.flatten().long(), tuple(slots))


class ColumnPositions(NamedTuple):
    starts_QB: torch.Tensor
    """int32: positions, with 0 for padding."""
    positions_QB: torch.Tensor
    """int64: the same positions."""
    num_real_QB: torch.Tensor
    """int32: 1 for real tokens, 0 for padding."""
    slots: tuple[torch.Tensor, ...]
    """int64 [Q, B]."""


def locate_columns(
    starts_B: torch.Tensor,
    num_real_B: torch.Tensor,
    queries: int,
    tables: tuple[torch.Tensor, ...],
    sizes: tuple[int, ...],
) -> ColumnPositions:
    """Return positions and slots for a padded batch of `queries` columns, column by column."""
    rows = len(starts_B)
    no_tokens_BQ = torch.zeros(rows, queries, dtype=torch.int32, device=starts_B.device)
    located = locate_rectangle(no_tokens_BQ, starts_B, num_real_B, tables, sizes)
    real_BQ = torch.arange(queries, dtype=torch.int32, device=starts_B.device) < num_real_B[:, None]

    def transpose(tensor: torch.Tensor) -> torch.Tensor:
        # Transpose int32: a Gaudi cannot compile an int64 permutation into a graph (docs/contributing/quirks.md, C16).
        return tensor.int().view(rows, queries).T.contiguous()

    starts_QB = transpose(located.positions_T)
    slots = tuple(transpose(slots_T).long() for slots_T in located.slots)
    return ColumnPositions(starts_QB, starts_QB.long(), transpose(real_BQ), slots)


# --- rows ---


class Newest(NamedTuple):
    tokens_BN: torch.Tensor
    starts_B: torch.Tensor
    """int32: position of the first token, or 0 in rows without tokens."""
    num_real_B: torch.Tensor
    """int32: N, or 0 in rows without tokens."""


def take_newest(
    history_RM: torch.Tensor, rows_B: torch.Tensor, lengths_B: torch.Tensor, wanted_B: torch.Tensor, count: int
) -> Newest:
    """Return the last `count` tokens of each row with `wanted_B` above 0. `lengths_B` contains the row lengths."""
    is_wanted_B = wanted_B > 0
    starts_B = torch.where(is_wanted_B, lengths_B - count, 0)
    offsets_N = torch.arange(count, dtype=torch.int32, device=rows_B.device)
    index_BN = rows_B.int()[:, None] * history_RM.shape[1] + starts_B[:, None] + offsets_N
    tokens_BN = history_RM.view(-1).index_select(0, index_BN.flatten().long()).view(index_BN.shape)
    return Newest(tokens_BN, starts_B, is_wanted_B.int() * count)


def append(
    history: torch.Tensor,
    rows_B: torch.Tensor,
    first_B: torch.Tensor,
    tokens_BN: torch.Tensor,
    num_B: torch.Tensor,
    *,
    width: int,
    pad_row: int,
) -> None:
    """Write each row's first `num_B` tokens at position `first_B`. The other tokens may be written to the pad row.

    `history` contains rows of `width` tokens in one dimension, because captured steps cannot write through views.
    """
    offsets_N = torch.arange(tokens_BN.shape[1], dtype=torch.int32, device=rows_B.device)
    is_real_BN = (offsets_N < num_B[:, None]) & (rows_B != pad_row)[:, None]
    target_BN = rows_B.int()[:, None] * width + first_B[:, None] + offsets_N
    index = torch.where(is_real_BN, target_BN, pad_row * width + offsets_N).flatten()
    history.index_copy_(0, index.long(), tokens_BN.flatten())


def put(state_R: torch.Tensor, rows_B: torch.Tensor, numbers_B: torch.Tensor, *, pad_row: int) -> None:
    """Write one value per row. The pad row keeps the value 0."""
    state_R.index_copy_(0, rows_B, torch.where(rows_B == pad_row, 0, numbers_B).to(state_R.dtype))


# --- drafts ---


def check_drafts(
    tokens_BK: torch.Tensor,
    num_B: torch.Tensor,
    most_B: torch.Tensor,
    sound_BK: torch.Tensor | None,
    vocab_size: int | None,
    *,
    mark: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the drafts, with tokens outside the vocabulary replaced, and the number of drafts in each row.

    A row's number becomes `mark` if one of its drafts is outside the vocabulary or comes from logits with NaN or +inf,
    or if the number is negative or exceeds `most_B`.
    """
    offsets_K = torch.arange(tokens_BK.shape[1], dtype=torch.int32, device=tokens_BK.device)
    wrong_BK = tokens_BK < 0
    known_BK = tokens_BK.clamp(min=0)
    if vocab_size is not None:
        wrong_BK = wrong_BK | (tokens_BK >= vocab_size)
        known_BK = known_BK.clamp(max=vocab_size - 1)
    if sound_BK is not None:
        wrong_BK = wrong_BK | ~sound_BK
    wrong_B = (wrong_BK & (offsets_K < num_B[:, None])).any(1) | (num_B < 0) | (num_B > most_B)
    return known_BK, torch.where(wrong_B, mark, num_B).int()


class RowOperations(NamedTuple):
    """A device's implementations of the functions in this module."""

    locate_rectangle: Callable[..., Positions] = locate_rectangle
    locate_columns: Callable[..., ColumnPositions] = locate_columns
    take_newest: Callable[..., Newest] = take_newest
    append: Callable[..., None] = append
    put: Callable[..., None] = put
    check_drafts: Callable[..., tuple[torch.Tensor, torch.Tensor]] = check_drafts


TORCH = RowOperations()

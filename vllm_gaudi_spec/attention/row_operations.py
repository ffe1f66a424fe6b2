"""Bookkeeping on the device: positions, slots, histories, counts; a few numbers a row.

Each function here is some small torch operations. Launched one by one, those of a step cost as much as layers of a
small model, so a device may have one kernel for a function, which gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")

FUNCTIONS: dict[str, Callable[..., object]] = {}
"""As torch operations, by name."""
_kernels: dict[tuple[str, str], Callable[..., object]] = {}


def use(device_type: str, kernels: Mapping[str, Callable[..., object]]) -> None:
    """Kernels for functions of this module, by name, where the first tensor is on such a device."""
    for name, kernel in kernels.items():
        if name not in FUNCTIONS:
            raise ValueError(f"{name} is no operation on rows; there are {', '.join(sorted(FUNCTIONS))}")
        _kernels[name, device_type] = kernel


def _operation(plain: Callable[_P, _T]) -> Callable[_P, _T]:
    FUNCTIONS[plain.__name__] = plain

    @wraps(plain)
    def run(*args: _P.args, **named: _P.kwargs) -> _T:
        first = args[0]
        assert isinstance(first, torch.Tensor)
        kernel = _kernels.get((plain.__name__, first.device.type), plain)
        return kernel(*args, **named)  # type: ignore[return-value]

    return run


# --- where tokens are ---


class Positions(NamedTuple):
    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    """int64."""
    slots: tuple[torch.Tensor, ...]
    """int64 [T], one a KV cache group."""


@_operation
def positions(
    tokens_BQ: torch.Tensor,
    starts_B: torch.Tensor,
    num_real_B: torch.Tensor,
    tables: tuple[torch.Tensor, ...],
    sizes: tuple[int, ...],
) -> Positions:
    """Of the tokens of `rectangle`, which describes padding. `tables` and `sizes` as `Blocks` has them."""
    rows, queries = tokens_BQ.shape
    indices_BQ = torch.arange(rows * queries, dtype=torch.int32, device=tokens_BQ.device).view(rows, queries)
    offsets_Q = indices_BQ[0]
    everywhere_BQ = starts_B.unsqueeze(1) + offsets_Q
    real_BQ = offsets_Q < num_real_B.unsqueeze(1)
    # Padding may extend past the end of the block table.
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
    """int32: positions; 0 for padding."""
    positions_QB: torch.Tensor
    """int64: the same."""
    num_real_QB: torch.Tensor
    """int32: 1, or 0 for padding."""
    slots: tuple[torch.Tensor, ...]
    """int64 [Q, B]."""


@_operation
def column_positions(
    starts_B: torch.Tensor,
    num_real_B: torch.Tensor,
    queries: int,
    tables: tuple[torch.Tensor, ...],
    sizes: tuple[int, ...],
) -> ColumnPositions:
    """The same of a rectangle of so many queries, column by column."""
    rows = len(starts_B)
    no_tokens_BQ = torch.zeros(rows, queries, dtype=torch.int32, device=starts_B.device)
    located = positions(no_tokens_BQ, starts_B, num_real_B, tables, sizes)
    real_BQ = torch.arange(queries, dtype=torch.int32, device=starts_B.device) < num_real_B[:, None]

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        # As int32: a permutation of int64 is not in a Gaudi's compiled graph (lesson C16).
        return tensor.int().view(rows, queries).T.contiguous()

    starts_QB = turned(located.positions_T)
    slots = tuple(turned(slots_T).long() for slots_T in located.slots)
    return ColumnPositions(starts_QB, starts_QB.long(), turned(real_BQ), slots)


# --- what rows have ---


class Newest(NamedTuple):
    tokens_BN: torch.Tensor
    starts_B: torch.Tensor
    """int32: position of the first; 0 in rows without any."""
    num_real_B: torch.Tensor
    """int32: N, or 0."""


@_operation
def newest(
    history_RM: torch.Tensor, rows_B: torch.Tensor, lengths_B: torch.Tensor, wanted_B: torch.Tensor, count: int
) -> Newest:
    """The last `count` tokens of rows of these lengths, where any are wanted."""
    is_wanted_B = wanted_B > 0
    starts_B = torch.where(is_wanted_B, lengths_B - count, 0)
    offsets_N = torch.arange(count, dtype=torch.int32, device=rows_B.device)
    index_BN = rows_B[:, None] * history_RM.shape[1] + starts_B[:, None] + offsets_N
    tokens_BN = history_RM.view(-1).index_select(0, index_BN.flatten()).view(index_BN.shape)
    return Newest(tokens_BN, starts_B, is_wanted_B.int() * count)


@_operation
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
    """Write the first `num_B` tokens of each row from position `first_B` on. The pad row may get the others.
    `history`: rows of `width` tokens, flat: devices that capture steps change a tensor only as a whole."""
    offsets_N = torch.arange(tokens_BN.shape[1], dtype=torch.int32, device=rows_B.device)
    is_real_BN = (offsets_N < num_B[:, None]) & (rows_B != pad_row)[:, None]
    target_BN = rows_B[:, None] * width + first_B[:, None] + offsets_N
    index = torch.where(is_real_BN, target_BN, pad_row * width + offsets_N).flatten()
    history.index_copy_(0, index.long(), tokens_BN.flatten())


@_operation
def put(state_R: torch.Tensor, rows_B: torch.Tensor, numbers_B: torch.Tensor, *, pad_row: int) -> None:
    """A number of each row; the pad row stays at 0."""
    state_R.index_copy_(0, rows_B, torch.where(rows_B == pad_row, 0, numbers_B).to(state_R.dtype))


# --- drafts ---


@_operation
def checked_drafts(
    tokens_BK: torch.Tensor,
    num_B: torch.Tensor,
    most_B: torch.Tensor,
    sound_BK: torch.Tensor | None,
    vocab_size: int | None,
    *,
    mark: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, of which those outside of the vocabulary are replaced, and counts: `mark` in rows of which a draft is
    none, was not made of numbers, or that have more than `most_B` or fewer than none."""
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

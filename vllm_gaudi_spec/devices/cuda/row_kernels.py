"""The functions in `attention/row_operations.py` as Triton kernels, with one kernel per function.

These short kernels do not start early (`launch.py`), because attention loads positions and slots before it waits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from vllm_gaudi_spec.attention.row_operations import ColumnPositions, Newest, Positions, RowOperations

_TILE = 128
_MOST_TOKENS = 1 << 31


def _make_contiguous(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """Make tensors contiguous, because some of them are columns of a larger tensor that was copied from the host."""
    return (tensor.contiguous() for tensor in tensors)


def locate_rectangle(
    tokens_BQ: torch.Tensor,
    starts_B: torch.Tensor,
    num_real_B: torch.Tensor,
    tables: tuple[torch.Tensor, ...],
    sizes: tuple[int, ...],
) -> Positions:
    rows, queries = tokens_BQ.shape
    tokens_BQ, starts_B, num_real_B = _make_contiguous(tokens_BQ, starts_B, num_real_B)
    tokens_T = tokens_BQ.new_empty(rows * queries)
    positions_T = tokens_BQ.new_empty(rows * queries, dtype=torch.int64)
    slots = tuple(torch.empty_like(positions_T) for _ in tables)
    # A model without attention has no block tables.
    for table_BW, size, slots_T in zip(tables or (tokens_BQ,), sizes or (1,), slots or (positions_T,), strict=True):
        _locate_rectangle[(triton.cdiv(rows * queries, _TILE),)](
            tokens_BQ,
            starts_B,
            num_real_B,
            table_BW,
            table_BW.stride(0),
            tokens_T,
            positions_T,
            slots_T,
            rows * queries,
            queries,
            SIZE=size,
            SLOTS=bool(tables),
            TILE=_TILE,
            num_warps=4,
        )
    return Positions(tokens_T, positions_T, slots)


@triton.jit(do_not_specialize=["num_tokens", "queries"])
def _locate_rectangle(
    tokens_ptr,
    starts_ptr,
    num_real_ptr,
    table_ptr,
    table_stride,
    tokens_out,
    positions_out,
    slots_out,
    num_tokens,
    queries,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    at_T = tl.program_id(0) * TILE + tl.arange(0, TILE)
    used_T = at_T < num_tokens
    row_T, query_T = at_T // queries, at_T % queries
    real_T = used_T & (query_T < tl.load(num_real_ptr + row_T, mask=used_T, other=0))
    position_T = tl.load(starts_ptr + row_T, mask=real_T, other=0) + query_T
    position_T = tl.where(real_T, position_T, 0)
    tl.store(tokens_out + at_T, tl.load(tokens_ptr + at_T, mask=real_T, other=0), mask=used_T)
    tl.store(positions_out + at_T, position_T, mask=used_T)
    if SLOTS:
        slot_T = _slot(table_ptr, table_stride, row_T, position_T, at_T, real_T, SIZE)
        tl.store(slots_out + at_T, slot_T, mask=used_T)


@triton.jit
def _slot(table_ptr, table_stride, row_T, position_T, at_T, real_T, SIZE: tl.constexpr):
    block_T = tl.load(table_ptr + row_T.to(tl.int64) * table_stride + position_T // SIZE, mask=real_T, other=0)
    return tl.where(real_T, block_T.to(tl.int64) * SIZE + position_T % SIZE, (at_T % SIZE).to(tl.int64))


def locate_columns(
    starts_B: torch.Tensor,
    num_real_B: torch.Tensor,
    queries: int,
    tables: tuple[torch.Tensor, ...],
    sizes: tuple[int, ...],
) -> ColumnPositions:
    rows = len(starts_B)
    starts_B, num_real_B = _make_contiguous(starts_B, num_real_B)
    starts_QB = starts_B.new_empty(queries, rows, dtype=torch.int32)
    num_real_QB = torch.empty_like(starts_QB)
    positions_QB = torch.empty_like(starts_QB, dtype=torch.int64)
    slots = tuple(torch.empty_like(positions_QB) for _ in tables)
    # A model without attention has no block tables.
    for table_BW, size, slots_QB in zip(tables or (starts_QB,), sizes or (1,), slots or (positions_QB,), strict=True):
        _locate_columns[(triton.cdiv(rows * queries, _TILE),)](
            starts_B,
            num_real_B,
            table_BW,
            table_BW.stride(0),
            starts_QB,
            positions_QB,
            num_real_QB,
            slots_QB,
            rows,
            queries,
            SIZE=size,
            SLOTS=bool(tables),
            TILE=_TILE,
            num_warps=4,
        )
    return ColumnPositions(starts_QB, positions_QB, num_real_QB, slots)


@triton.jit(do_not_specialize=["rows", "queries"])
def _locate_columns(
    starts_ptr,
    num_real_ptr,
    table_ptr,
    table_stride,
    starts_out,
    positions_out,
    num_real_out,
    slots_out,
    rows,
    queries,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    at_T = tl.program_id(0) * TILE + tl.arange(0, TILE)
    used_T = at_T < rows * queries
    query_T, row_T = at_T // rows, at_T % rows
    real_T = used_T & (query_T < tl.load(num_real_ptr + row_T, mask=used_T, other=0))
    position_T = tl.load(starts_ptr + row_T, mask=real_T, other=0) + query_T
    position_T = tl.where(real_T, position_T, 0)
    tl.store(starts_out + at_T, position_T, mask=used_T)
    tl.store(positions_out + at_T, position_T, mask=used_T)
    tl.store(num_real_out + at_T, real_T.to(tl.int32), mask=used_T)
    if SLOTS:
        # A padding slot is derived from the index of the token in the padded batch.
        slot_T = _slot(table_ptr, table_stride, row_T, position_T, row_T * queries + query_T, real_T, SIZE)
        tl.store(slots_out + at_T, slot_T, mask=used_T)


def take_newest(
    history_RM: torch.Tensor, rows_B: torch.Tensor, lengths_B: torch.Tensor, wanted_B: torch.Tensor, count: int
) -> Newest:
    rows = len(rows_B)
    rows_B, lengths_B, wanted_B = _make_contiguous(rows_B, lengths_B, wanted_B)
    tokens_BN = history_RM.new_empty(rows, count)
    starts_B, num_real_B = torch.empty_like(lengths_B), rows_B.new_empty(rows, dtype=torch.int32)
    _take_newest[(triton.cdiv(rows, _TILE),)](
        history_RM,
        history_RM.stride(0),
        rows_B,
        lengths_B,
        wanted_B,
        tokens_BN,
        starts_B,
        num_real_B,
        rows,
        COUNT=count,
        TILE=_TILE,
        num_warps=4,
    )
    return Newest(tokens_BN, starts_B, num_real_B)


@triton.jit(do_not_specialize=["rows"])
def _take_newest(
    history_ptr,
    history_stride,
    rows_ptr,
    lengths_ptr,
    wanted_ptr,
    tokens_out,
    starts_out,
    num_real_out,
    rows,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
):
    at_B = tl.program_id(0) * TILE + tl.arange(0, TILE)
    used_B = at_B < rows
    is_wanted_B = tl.load(wanted_ptr + at_B, mask=used_B, other=0) > 0
    start_B = tl.where(is_wanted_B, tl.load(lengths_ptr + at_B, mask=used_B, other=0) - COUNT, 0)
    first_B = history_ptr + tl.load(rows_ptr + at_B, mask=used_B, other=0).to(tl.int64) * history_stride + start_B
    for offset in tl.static_range(COUNT):
        token_B = tl.load(first_B + offset, mask=used_B, other=0)
        tl.store(tokens_out + at_B * COUNT + offset, token_B, mask=used_B)
    tl.store(starts_out + at_B, start_B, mask=used_B)
    tl.store(num_real_out + at_B, is_wanted_B.to(tl.int32) * COUNT, mask=used_B)


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
    rows, count = tokens_BN.shape
    rows_B, first_B, tokens_BN, num_B = _make_contiguous(rows_B, first_B, tokens_BN, num_B)
    _append[(triton.cdiv(rows * count, _TILE),)](
        history,
        width,
        rows_B,
        first_B,
        tokens_BN,
        num_B,
        rows * count,
        count,
        pad_row,
        TILE=_TILE,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_tokens", "count", "pad_row"])
def _append(
    history_ptr,
    width,
    rows_ptr,
    first_ptr,
    tokens_ptr,
    num_ptr,
    num_tokens,
    count,
    pad_row,
    TILE: tl.constexpr,
):
    at_T = tl.program_id(0) * TILE + tl.arange(0, TILE)
    used_T = at_T < num_tokens
    index_T, offset_T = at_T // count, at_T % count
    row_T = tl.load(rows_ptr + index_T, mask=used_T, other=0)
    real_T = used_T & (row_T != pad_row) & (offset_T < tl.load(num_ptr + index_T, mask=used_T, other=0))
    position_T = tl.load(first_ptr + index_T, mask=real_T, other=0) + offset_T
    token_T = tl.load(tokens_ptr + at_T, mask=real_T, other=0)
    tl.store(history_ptr + row_T.to(tl.int64) * width + position_T, token_T, mask=real_T)


def put(state_R: torch.Tensor, rows_B: torch.Tensor, numbers_B: torch.Tensor, *, pad_row: int) -> None:
    rows = len(rows_B)
    rows_B, numbers_B = _make_contiguous(rows_B, numbers_B)
    _put[(triton.cdiv(rows, _TILE),)](state_R, rows_B, numbers_B, rows, pad_row, TILE=_TILE, num_warps=4)


@triton.jit(do_not_specialize=["rows", "pad_row"])
def _put(state_ptr, rows_ptr, numbers_ptr, rows, pad_row, TILE: tl.constexpr):
    at_B = tl.program_id(0) * TILE + tl.arange(0, TILE)
    used_B = at_B < rows
    row_B = tl.load(rows_ptr + at_B, mask=used_B, other=0)
    number_B = tl.load(numbers_ptr + at_B, mask=used_B & (row_B != pad_row), other=0)
    tl.store(state_ptr + row_B, number_B, mask=used_B)


def check_drafts(
    tokens_BK: torch.Tensor,
    num_B: torch.Tensor,
    most_B: torch.Tensor,
    sound_BK: torch.Tensor | None,
    vocab_size: int | None,
    *,
    mark: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, count = tokens_BK.shape
    tokens_BK, num_B, most_B = _make_contiguous(tokens_BK, num_B, most_B)
    known_BK, checked_B = tokens_BK.new_empty(rows, count), num_B.new_empty(rows, dtype=torch.int32)
    _check_drafts[(triton.cdiv(rows, _TILE),)](
        tokens_BK,
        num_B,
        most_B,
        # View the booleans as bytes.
        tokens_BK if sound_BK is None else sound_BK.contiguous().view(torch.uint8),
        known_BK,
        checked_B,
        rows,
        _MOST_TOKENS if vocab_size is None else vocab_size,
        mark,
        COUNT=count,
        SOUND=sound_BK is not None,
        TILE=_TILE,
        num_warps=4,
    )
    return known_BK, checked_B


@triton.jit(do_not_specialize=["rows", "vocab_size", "mark"])
def _check_drafts(
    tokens_ptr,
    num_ptr,
    most_ptr,
    sound_ptr,
    tokens_out,
    num_out,
    rows,
    vocab_size,
    mark,
    COUNT: tl.constexpr,
    SOUND: tl.constexpr,
    TILE: tl.constexpr,
):
    at_B = tl.program_id(0) * TILE + tl.arange(0, TILE)
    used_B = at_B < rows
    num_B = tl.load(num_ptr + at_B, mask=used_B, other=0)
    wrong_B = (num_B < 0) | (num_B > tl.load(most_ptr + at_B, mask=used_B, other=0))
    for offset in tl.static_range(COUNT):
        token_B = tl.load(tokens_ptr + at_B * COUNT + offset, mask=used_B, other=0)
        is_wrong_B = (token_B < 0) | (token_B >= vocab_size)
        if SOUND:
            is_wrong_B |= tl.load(sound_ptr + at_B * COUNT + offset, mask=used_B, other=1) == 0
        wrong_B |= is_wrong_B & (offset < num_B)
        token_B = tl.minimum(tl.maximum(token_B, 0).to(tl.int64), vocab_size - 1)
        tl.store(tokens_out + at_B * COUNT + offset, token_B, mask=used_B)
    tl.store(num_out + at_B, tl.where(wrong_B, mark, num_B), mask=used_B)


ROW_OPERATIONS = RowOperations(
    locate_rectangle=locate_rectangle,
    locate_columns=locate_columns,
    take_newest=take_newest,
    append=append,
    put=put,
    check_drafts=check_drafts,
)

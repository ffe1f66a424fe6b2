"""Attention for rows with few queries (decodes, verify steps, and drafts) in one Triton kernel per layer.

The kernel rotates queries and keys, writes keys and values, computes attention, and combines the results of several
program instances. It reads earlier keys from the cache and new keys from the projection, so that no instance waits for
another instance's write. An instance loads its first keys before the preceding kernel has finished. This is safe
because those keys were written in an earlier forward pass, and because some kernels between two forward passes, such as
the embedding lookup, do not start early. The tensors that describe the call are loaded early for the same reason.

Dimensions have the same names as in `attention`: B rows with Q queries each, H heads in K groups of G, one group per KV
head; D head size; T = B * Q. The Q * G queries in a row that share a KV head are the lanes of a tile.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_gaudi_spec.devices.cuda import attention, launch

if TYPE_CHECKING:
    from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec
    from vllm_gaudi_spec.devices.common.kv_pair import KVPair

MOST_QUERIES, MOST_LANES = 16, 64
"""Limits for a row, whose new keys and lanes must each fit in one tile."""
_MOST_ARRIVALS = 4096
"""The maximum number of rows times KV heads at which keys may be split. Above it, the GPU is full without splits."""
_COMBINED = 8192
"""The number of partial values combined at once."""
_LAUNCHED = 2048
"""The maximum number of instances to launch if rows differ in length. Each idle instance takes a little time. The last
splits, which are mostly idle, start last. This delays a long row among short ones but speeds up other batches."""
_ENOUGH_SPLITS = 4
"""With more splits than this, as in batches with few rows, one long row does not delay the others."""


class Form(NamedTuple):
    """A configuration of the kernel."""

    key_tile_bytes: int
    """The number of bytes of keys read at once, at most one KV block."""
    num_warps: int
    instances: int
    """The total number of program instances into which a batch with few rows is split."""


# An H100 can hold 528 instances that have 128 threads with 128 registers each.
SHORT_HEADS = Form(8 << 10, 4, 528)
"""The configuration for head sizes up to 64. Twice the splits, half the warps, or half-size tiles were slower."""
LONG_HEADS = Form(16 << 10, 4, 528)


class Projected(NamedTuple):
    """The queries, keys, and values that a layer's projection computed for all tokens, and the KV slots of the tokens.

    The elements of each token are contiguous, head by head.
    """

    query_TH: torch.Tensor
    key_TK: torch.Tensor
    value_TK: torch.Tensor
    slots_T: torch.Tensor


class Rotary(NamedTuple):
    """A rotary embedding of the first `dim` elements of each head, in pairs that are `dim / 2` elements apart.

    Each row of `table` contains the cosines for a position, followed by its sines.
    """

    positions_T: torch.Tensor
    table: torch.Tensor
    dim: int


def takes(call: AttentionCall, spec: AttentionLayerSpec) -> bool:
    lanes = call.num_queries * (spec.num_heads // spec.num_kv_heads)
    if spec.value_size is not None or spec.attention_chunk is not None or not spec.is_causal:
        return False
    if spec.sinks_H is not None or spec.slopes_H is not None or call.spans is not None:
        return False
    return call.num_queries <= MOST_QUERIES and lanes <= MOST_LANES


@cache
def _get_arrivals(device: torch.device) -> torch.Tensor:
    """Return arrival counters for rows and KV heads, which kernels on the same stream share and reset to zero."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("attention with split keys must run once before it is captured")
    return torch.zeros(_MOST_ARRIVALS, dtype=torch.int32, device=device)


def attend(
    projected: Projected, rotary: Rotary, kv: KVPair, call: AttentionCall, spec: AttentionLayerSpec
) -> torch.Tensor:
    """Write keys and values to the cache and return the attention output [T, H * D]."""
    query_TH, key_TK, value_TK, slots_T = projected
    keys, values = kv.tensors()
    out_TH = query_TH.new_empty(query_TH.shape)
    group, tile_d = spec.num_heads // spec.num_kv_heads, triton.next_power_of_2(spec.head_size)
    form = SHORT_HEADS if tile_d <= 64 else LONG_HEADS
    lanes = call.num_queries * group
    tile_n = attention.choose_key_tile(spec.block_size, tile_d * keys.element_size(), form.key_tile_bytes)
    width = call.block_table_BW.shape[1]
    instances = spec.num_kv_heads * call.num_rows
    even_splits = attention.num_splits(form.instances, instances, width, spec, tile_n)
    splits = _count_launched(even_splits, instances, attention.measure_reach(width, spec), tile_n)
    parts, maxima, sums, arrivals = out_TH, out_TH, out_TH, out_TH
    if splits > 1:
        shape = (len(query_TH), spec.num_heads, splits)
        parts = torch.empty((*shape, tile_d), dtype=torch.float32, device=out_TH.device)
        maxima, sums = torch.empty((2, *shape), dtype=torch.float32, device=out_TH.device).unbind(0)
        arrivals = _get_arrivals(out_TH.device)
    tile_l = triton.next_power_of_2(lanes)
    _attend[(spec.num_kv_heads, call.num_rows, splits)](
        query_TH,
        key_TK,
        value_TK,
        slots_T,
        rotary.positions_T,
        rotary.table,
        keys,
        values,
        call.block_table_BW,
        call.starts_B,
        out_TH,
        parts,
        maxima,
        sums,
        arrivals,
        spec.scale,
        spec.logits_soft_cap,
        query_TH.stride(0),
        key_TK.stride(0),
        value_TK.stride(0),
        call.block_table_BW.stride(0),
        call.num_queries,
        call.num_rows,
        splits,
        even_splits,
        GROUP=group,
        KV_HEADS=spec.num_kv_heads,
        HEAD_SIZE=spec.head_size,
        HALF=rotary.dim // 2,
        BLOCK_SIZE=spec.block_size,
        WINDOW=spec.sliding_window or 0,
        CAPPED=spec.logits_soft_cap > 0,
        IS_SPLIT=splits > 1,
        IS_BALANCED=splits > even_splits,
        TILE_M=max(tile_l, 16),
        TILE_L=tile_l,
        TILE_Q=MOST_QUERIES,
        TILE_N=tile_n,
        TILE_D=tile_d,
        TILE_S=min(max(_COMBINED // (tile_l * tile_d), 1), 32),
        num_warps=form.num_warps,
        num_stages=2,
        **launch.options(),
    )
    return out_TH


def _count_launched(even_splits: int, instances: int, reach: int, tile_n: int) -> int:
    """Return the number of instances to launch per row and KV head. Only long rows use all of the instances.

    `even_splits` is the number of instances to launch if all rows have the same length.
    """
    is_full = instances > _MOST_ARRIVALS or (even_splits == 1 and reach <= attention.SHORT)
    if is_full or even_splits > _ENOUGH_SPLITS:
        return even_splits
    return min(max(even_splits, 2, _LAUNCHED // instances), triton.cdiv(reach, tile_n), attention.MOST_SPLITS)


# Do not specialize on these arguments, so that one compilation works for all batch sizes.
@triton.jit(do_not_specialize=["queries", "rows", "splits", "even_splits"])
def _attend(
    query_ptr,
    key_ptr,
    value_ptr,
    slots_ptr,
    positions_ptr,
    rotary_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    starts_ptr,
    out_ptr,
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    arrivals_ptr,
    scale,
    soft_cap,
    query_stride,
    key_stride,
    value_stride,
    table_stride,
    queries,
    rows,
    splits,
    even_splits,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_BALANCED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_L: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_S: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.let_next_start(EARLY)
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    dim_D = tl.arange(0, TILE_D)
    lane_M = tl.arange(0, TILE_M)
    offset_M = lane_M // GROUP
    head_M = head * GROUP + lane_M % GROUP
    used_M = lane_M < queries * GROUP
    token_M = (row * queries + offset_M).to(tl.int64)
    offset_Q = tl.arange(0, TILE_Q)
    token_Q = (row * queries + offset_Q).to(tl.int64)
    # Issue independent loads together so that their latencies overlap.
    start = tl.load(starts_ptr + row)
    position_M = tl.load(positions_ptr + token_M, mask=used_M, other=0)
    position_Q = tl.load(positions_ptr + token_Q, mask=offset_Q < queries, other=0)
    slot_Q = tl.load(slots_ptr + token_Q, mask=offset_Q < queries, other=0)

    # Find the range of earlier keys visible to any lane, and then this split's share of that range in whole tiles.
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start - WINDOW + 1, 0) // TILE_N * TILE_N
    tiles = tl.cdiv(start - begin, TILE_N)
    used_splits = splits
    if IS_BALANCED:
        even_share = _average_tiles(starts_ptr, rows, even_splits, WINDOW, TILE_N)
        used_splits = tl.minimum(tl.maximum((tiles + even_share // 2) // even_share, 1), splits)
    share = tl.cdiv(tiles, used_splits) * TILE_N
    low = begin + split * share
    high = tl.minimum(low + share, start)
    # The new keys belong to the split after the last one with earlier keys or, if there is no such split, to the last
    # one. Later splits have no work, because the number of splits is based on the longest row in the bucket. They exit
    # before loading anything.
    last = tl.minimum(tl.cdiv(start - begin, tl.maximum(share, 1)), used_splits - 1)
    if split > last:
        return
    cos_MD, sin_MD = _load_angles(position_M, used_M, rotary_ptr, HALF, TILE_D)
    used_Q = (offset_Q < queries) & (split == last)
    cos_QD, sin_QD = _load_angles(position_Q, used_Q, rotary_ptr, HALF, TILE_D)
    exists_N = low + tl.arange(0, TILE_N) < high
    keys_ND, values_ND = attention.load_keys(
        # A split's share may begin after the last key, where the row has no KV blocks.
        tl.where(low < high, low, 0),
        exists_N,
        table_ptr + row * table_stride,
        keys_ptr,
        values_ptr,
        head,
        KV_HEADS,
        HEAD_SIZE,
        BLOCK_SIZE,
        True,
        TILE_N,
        TILE_D,
    )

    launch.wait(EARLY)
    # Load all data written by other kernels together, so that the latencies overlap.
    new_QD = head * HEAD_SIZE + dim_D[None, :]
    used_QD = used_Q[:, None] & (dim_D < HEAD_SIZE)[None, :]
    value_QD = tl.load(value_ptr + token_Q[:, None] * value_stride + new_QD, mask=used_QD, other=0.0)
    key_Q = key_ptr + token_Q * key_stride + head * HEAD_SIZE
    key_QD = _load_rotated(key_Q, used_Q, cos_QD, sin_QD, HEAD_SIZE, HALF, TILE_D)
    query_M = query_ptr + token_M * query_stride + head_M * HEAD_SIZE
    query_MD = _load_rotated(query_M, used_M, cos_MD, sin_MD, HEAD_SIZE, HALF, TILE_D)
    state = (
        tl.full((TILE_M,), attention.LOWEST, dtype=tl.float32),
        tl.zeros((TILE_M,), dtype=tl.float32),
        tl.zeros((TILE_M, TILE_D), dtype=tl.float32),
    )
    seen_MN = exists_N[None, :]
    if WINDOW > 0:
        seen_MN = seen_MN & ((low + tl.arange(0, TILE_N))[None, :] > (start + offset_M)[:, None] - WINDOW)
    state = attention.take(state, query_MD, keys_ND, values_ND, seen_MN, scale, soft_cap, CAPPED, True)
    for first in range(low + TILE_N, high, TILE_N):
        state = attention.take_keys(
            state,
            query_MD,
            start + offset_M,
            first,
            high,
            table_ptr + row * table_stride,
            keys_ptr,
            values_ptr,
            head,
            scale,
            soft_cap,
            KV_HEADS,
            HEAD_SIZE,
            BLOCK_SIZE,
            True,
            WINDOW,
            CAPPED,
            True,
            TILE_N,
            TILE_D,
        )
    if split == last:
        key_QD, value_QD = attention.finite(key_QD), attention.finite(value_QD)
        stored_QD = slot_Q[:, None] * (KV_HEADS * HEAD_SIZE) + new_QD
        tl.store(keys_ptr + stored_QD, key_QD, mask=used_QD)
        tl.store(values_ptr + stored_QD, value_QD, mask=used_QD)
        seen_MQ = used_Q[None, :] & (offset_Q[None, :] <= offset_M[:, None])
        if WINDOW > 0:
            seen_MQ = seen_MQ & (offset_Q[None, :] > offset_M[:, None] - WINDOW)
        state = attention.take(state, query_MD, key_QD, value_QD, seen_MQ, scale, soft_cap, CAPPED, True)
    max_M, sum_M, total_MD = state

    if last == 0:
        result_MD = total_MD / sum_M[:, None]
        out_MD = out_ptr + (token_M * (KV_HEADS * GROUP) + head_M)[:, None] * HEAD_SIZE + dim_D[None, :]
        used_MD = used_M[:, None] & (dim_D < HEAD_SIZE)[None, :]
        tl.store(out_MD, result_MD.to(out_ptr.dtype.element_ty), mask=used_MD)
    elif IS_SPLIT:
        part_M = (token_M * (KV_HEADS * GROUP) + head_M) * splits + split
        tl.store(parts_ptr + part_M[:, None] * TILE_D + dim_D[None, :], total_MD, mask=used_M[:, None])
        tl.store(maxima_ptr + part_M, max_M, mask=used_M)
        tl.store(sums_ptr + part_M, sum_M, mask=used_M)
        # All threads must have stored their results before the arrival is counted.
        tl.debug_barrier()
        arrivals = arrivals_ptr + row * KV_HEADS + head
        if tl.atomic_add(arrivals, 1, sem="acq_rel") == last:
            tl.store(arrivals, 0)
            _combine(
                parts_ptr,
                maxima_ptr,
                sums_ptr,
                out_ptr,
                row,
                head,
                queries,
                splits,
                last + 1,
                GROUP,
                KV_HEADS,
                HEAD_SIZE,
                TILE_L,
                TILE_S,
                TILE_D,
            )


@triton.jit
def _average_tiles(starts_ptr, rows, even_splits, WINDOW: tl.constexpr, TILE_N: tl.constexpr):
    """Return the number of tiles per instance, at least 1, that would result if all rows had the average length."""
    total = 0
    # A single warp adds 32 lengths without waiting for other warps.
    for first in range(0, rows, 32):
        row_R = first + tl.arange(0, 32)
        length_R = tl.load(starts_ptr + row_R, mask=row_R < rows, other=0)
        if WINDOW > 0:
            length_R = tl.minimum(length_R, WINDOW)
        total += tl.sum((length_R + TILE_N - 1) // TILE_N, 0)
    shares = rows * even_splits
    return tl.maximum((total + shares // 2) // shares, 1)


@triton.jit
def _load_angles(position_X, used_X, rotary_ptr, HALF: tl.constexpr, TILE_D: tl.constexpr):
    """Load cosines and sines, or 1 and 0 for elements that are not rotated."""
    dim_D = tl.arange(0, TILE_D)
    entry_XD = rotary_ptr + position_X[:, None] * (2 * HALF) + dim_D[None, :] % HALF
    turns_XD = used_X[:, None] & (dim_D < 2 * HALF)[None, :]
    cos_XD = tl.load(entry_XD, mask=turns_XD, other=1.0)
    sin_XD = tl.load(entry_XD + HALF, mask=turns_XD, other=0.0)
    return cos_XD, sin_XD


@triton.jit
def _load_rotated(
    at_X,
    used_X,
    cos_XD,
    sin_XD,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    TILE_D: tl.constexpr,
):
    """Load the heads that start at `at_X` and rotate them, reading each element with the other one in its pair."""
    dim_D = tl.arange(0, TILE_D)
    other_D = tl.where(dim_D < HALF, dim_D + HALF, tl.where(dim_D < 2 * HALF, dim_D - HALF, dim_D))
    used_XD = used_X[:, None] & (dim_D < HEAD_SIZE)[None, :]
    x_XD = tl.load(at_X[:, None] + dim_D[None, :], mask=used_XD, other=0.0)
    other_XD = tl.load(at_X[:, None] + other_D[None, :], mask=used_XD, other=0.0).to(tl.float32)
    other_XD = tl.where(dim_D[None, :] < HALF, -other_XD, other_XD)
    return (x_XD.to(tl.float32) * cos_XD.to(tl.float32) + other_XD * sin_XD.to(tl.float32)).to(x_XD.dtype)


@triton.jit
def _combine(
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    out_ptr,
    row,
    head,
    queries,
    splits,
    used,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE_L: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_D: tl.constexpr,
):
    """Combine the partial results for a row and KV head in an order that does not depend on which instances finish.

    Reads bypass the L1 cache of the multiprocessor, which does not reflect stores from other instances.
    """
    dim_D = tl.arange(0, TILE_D)
    lane_L = tl.arange(0, TILE_L)
    used_L = lane_L < queries * GROUP
    token_L = (row * queries + lane_L // GROUP).to(tl.int64)
    result_L = token_L * (KV_HEADS * GROUP) + head * GROUP + lane_L % GROUP
    max_L = tl.full((TILE_L,), attention.LOWEST, dtype=tl.float32)
    sum_L = tl.zeros((TILE_L,), dtype=tl.float32)
    total_LD = tl.zeros((TILE_L, TILE_D), dtype=tl.float32)
    for first in range(0, used, TILE_S):
        split_S = first + tl.arange(0, TILE_S)
        used_LS = used_L[:, None] & (split_S < used)[None, :]
        part_LS = result_L[:, None] * splits + split_S[None, :]
        max_LS = tl.load(maxima_ptr + part_LS, mask=used_LS, other=attention.LOWEST, cache_modifier=".cg")
        sum_LS = tl.load(sums_ptr + part_LS, mask=used_LS, other=0.0, cache_modifier=".cg")
        parts_LSD = tl.load(
            parts_ptr + part_LS[:, :, None] * TILE_D + dim_D[None, None, :],
            mask=used_LS[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_max_L = tl.maximum(max_L, tl.max(max_LS, 1))
        # A split without visible keys has the lowest maximum, so its weight is zero if another split has visible keys.
        weight_LS = tl.exp2(max_LS - new_max_L[:, None])
        rescale_L = tl.exp2(max_L - new_max_L)
        sum_L = sum_L * rescale_L + tl.sum(sum_LS * weight_LS, 1)
        total_LD = total_LD * rescale_L[:, None] + tl.sum(parts_LSD * weight_LS[:, :, None], 1)
        max_L = new_max_L
    out_LD = out_ptr + result_L[:, None] * HEAD_SIZE + dim_D[None, :]
    used_LD = used_L[:, None] & (dim_D < HEAD_SIZE)[None, :]
    tl.store(out_LD, (total_LD / sum_L[:, None]).to(out_ptr.dtype.element_ty), mask=used_LD)

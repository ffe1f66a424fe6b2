"""Paged attention on a GPU: one Triton kernel for decodes, verify steps, and chunks that prompts.py does not handle.

B rows with Q queries each; H query heads in K groups of G, one group per KV head; D head size; T = B * Q. The Q * G
queries in a row that share a KV head are the lanes of a tile, so that each key is read once for all of them. If the GPU
would not be full with one program instance per row and head, keys are split across several instances. The number of
splits depends on tensor shapes and not on lengths, so that one captured launch works for every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from vllm_gaudi_spec.attention import operations
from vllm_gaudi_spec.devices.cuda import launch

if TYPE_CHECKING:
    from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec
    from vllm_gaudi_spec.devices.common.kv_pair import KVPair

# The number of program instances that keeps a large GPU busy: four for each of an H200's multiprocessors. With more
# splits, combining the partial results takes more time than splitting saves.
_BUSY = 528
# With this many instances and contexts this short, splitting keys takes more time than it saves.
_FULL, SHORT = 192, 1024
# With this many instances, each has a multiprocessor of its own. With many lanes per tile, combining more partial
# results takes more time than splitting saves.
_ONE_EACH = 128
MOST_SPLITS = 32
_KEY_TILE_BYTES = 16 << 10
_LOG2_E = tl.constexpr(1.4426950408889634)
# The score of a masked key. It is finite, because inf - inf would be NaN for a query without visible keys in a tile.
LOWEST = tl.constexpr(-1e30)
_LARGEST = tl.constexpr(operations.LARGEST)


def attend(query_THD: torch.Tensor, kv: KVPair, call: AttentionCall, spec: AttentionLayerSpec) -> torch.Tensor:
    keys, values = kv.tensors()
    group, tile_d = spec.num_heads // spec.num_kv_heads, triton.next_power_of_2(spec.head_size)
    lanes = call.num_queries * group
    tile_m = min(max(triton.next_power_of_2(lanes), 16), 128 if tile_d <= 128 else 64)
    tile_n = choose_key_tile(spec.block_size, tile_d * keys.element_size())
    tiles = triton.cdiv(lanes, tile_m)
    # With smaller heads, each instance has less work to do.
    busy = _BUSY * max(128 // tile_d, 1) if tiles == 1 else _ONE_EACH
    splits = num_splits(busy, tiles * spec.num_kv_heads * call.num_rows, call.block_table_BW.shape[1], spec, tile_n)
    # In most prompt tiles, all lanes attend to many of the keys. This was measured only for head sizes 64 and 128.
    has_unmasked_keys = tiles > 1 and splits == 1 and spec.sliding_window is None and spec.head_size in (64, 128)
    out_THD = query_THD.new_empty(query_THD.shape)
    if has_unmasked_keys:
        # Two instances can then share a multiprocessor, so that one multiplies while the other computes exponentials.
        tile_m = 64
        tiles = triton.cdiv(lanes, tile_m)
    parts, maxima, sums = out_THD, out_THD, out_THD
    if splits > 1:
        shape = (*out_THD.shape[:2], splits)
        parts = torch.empty((*shape, tile_d), dtype=torch.float32, device=out_THD.device)
        maxima, sums = torch.empty((2, *shape), dtype=torch.float32, device=out_THD.device).unbind(0)
    grid = (tiles * splits, spec.num_kv_heads, call.num_rows)
    _attend_tile[grid](
        query_THD,
        keys,
        values,
        call.block_table_BW,
        call.starts_B,
        call.starts_B if spec.is_causal else call.num_real_B,
        out_THD,
        parts,
        maxima,
        sums,
        spec.scale,
        spec.logits_soft_cap,
        query_THD.stride(0),
        call.block_table_BW.stride(0),
        out_THD.stride(0),
        call.num_queries,
        splits,
        GROUP=group,
        KV_HEADS=spec.num_kv_heads,
        HEAD_SIZE=spec.head_size,
        BLOCK_SIZE=spec.block_size,
        CAUSAL=spec.is_causal,
        WINDOW=spec.sliding_window or 0,
        CAPPED=spec.logits_soft_cap > 0,
        IS_SPLIT=splits > 1,
        UNMASKED=has_unmasked_keys,
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_D=tile_d,
        num_warps=8 if tile_m * tile_d > 64 * 128 else 4,
        num_stages=2,
        **launch.options(),
    )
    if splits > 1:
        _combine[(spec.num_heads, out_THD.shape[0])](
            parts,
            maxima,
            sums,
            out_THD,
            out_THD.stride(0),
            splits,
            HEADS=spec.num_heads,
            HEAD_SIZE=spec.head_size,
            TILE_S=triton.next_power_of_2(splits),
            TILE_D=tile_d,
            **launch.options(),
        )
    return out_THD


def write_kv(key_TKD: torch.Tensor, value_TKD: torch.Tensor, kv: KVPair, slots_T: torch.Tensor) -> None:
    keys, values = kv.tensors()
    size = keys.shape[1] * keys.shape[2]
    _write[(slots_T.shape[0],)](
        key_TKD,
        value_TKD,
        slots_T,
        keys,
        values,
        key_TKD.stride(0),
        value_TKD.stride(0),
        SIZE=size,
        TILE=triton.next_power_of_2(size),
        **launch.options(),
    )


def choose_key_tile(block_size: int, key_bytes: int, tile_bytes: int = _KEY_TILE_BYTES) -> int:
    """Return the number of keys to read at once. All of them are in the same KV block and therefore equally spaced."""
    tile = 64
    while block_size % tile or (tile > 16 and tile * key_bytes > tile_bytes):
        tile //= 2
    return tile


def measure_reach(width: int, spec: AttentionLayerSpec) -> int:
    """Return the maximum number of keys that a query can attend to with block tables of this width."""
    reach = width * spec.block_size
    return reach if spec.sliding_window is None else min(reach, spec.sliding_window)


def num_splits(busy: int, num_instances: int, width: int, spec: AttentionLayerSpec, tile_n: int) -> int:
    reach = measure_reach(width, spec)
    if num_instances >= _FULL and reach <= SHORT:
        return 1
    return max(1, min(busy // num_instances, triton.cdiv(reach, tile_n), MOST_SPLITS))


# Do not specialize on these arguments, so that one compilation works for all batch sizes and chunk lengths.
@triton.jit(do_not_specialize=["queries", "splits"])
def _attend_tile(
    query_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    starts_ptr,
    num_real_ptr,
    out_ptr,
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    scale,
    soft_cap,
    query_stride,
    table_stride,
    out_stride,
    queries,
    splits,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    UNMASKED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.wait(EARLY)
    tile = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    if UNMASKED:
        # Process the tiles with the most keys first, so that no long tile starts last.
        tile = tl.cdiv(queries * GROUP, TILE_M) - 1 - tile
    head = tl.program_id(1)
    row = tl.program_id(2)
    start = tl.load(starts_ptr + row)

    lane_M = tile * TILE_M + tl.arange(0, TILE_M)
    offset_M = lane_M // GROUP
    head_M = head * GROUP + lane_M % GROUP
    used_M = lane_M < queries * GROUP
    token_M = (row * queries + offset_M).to(tl.int64)
    position_M = start + offset_M
    dim_D = tl.arange(0, TILE_D)
    used_MD = used_M[:, None] & (dim_D < HEAD_SIZE)[None, :]
    query_MD = tl.load(
        query_ptr + token_M[:, None] * query_stride + head_M[:, None] * HEAD_SIZE + dim_D[None, :],
        mask=used_MD,
        other=0.0,
    )

    # Find the range of keys visible to any lane in the tile, and then this split's share of that range in whole tiles.
    last = tl.minimum((tile * TILE_M + TILE_M - 1) // GROUP, queries - 1)
    end = start + last + 1
    if not CAUSAL:
        # Include all keys of the row but no padding after them. Keep one key in a padding row, so its sum is not 0.
        end = start + tl.maximum(tl.load(num_real_ptr + row), 1)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start + tile * TILE_M // GROUP - WINDOW + 1, 0) // TILE_N * TILE_N
        if not CAUSAL:
            begin = tl.minimum(begin, (end - 1) // TILE_N * TILE_N)
            end = tl.minimum(end, start + last + WINDOW)
    share = tl.cdiv(tl.cdiv(end - begin, TILE_N), splits) * TILE_N
    low = begin + split * share
    high = tl.minimum(low + share, end)

    out_MD = out_ptr + token_M[:, None] * out_stride + head_M[:, None] * HEAD_SIZE + dim_D[None, :]
    state = (
        tl.full((TILE_M,), LOWEST, dtype=tl.float32),
        tl.zeros((TILE_M,), dtype=tl.float32),
        tl.zeros((TILE_M, TILE_D), dtype=tl.float32),
    )
    first_masked = low
    if UNMASKED:
        # Every lane attends to all keys in these tiles, so positions need not be compared.
        num_visible = start + tile * TILE_M // GROUP + 1 if CAUSAL else end
        first_masked = tl.maximum(low, tl.minimum(high, num_visible) // TILE_N * TILE_N)
        for first in range(low, first_masked, TILE_N):
            state = take_keys(
                state,
                query_MD,
                position_M,
                first,
                end,
                table_ptr + row * table_stride,
                keys_ptr,
                values_ptr,
                head,
                scale,
                soft_cap,
                KV_HEADS,
                HEAD_SIZE,
                BLOCK_SIZE,
                CAUSAL,
                0,
                CAPPED,
                False,
                TILE_N,
                TILE_D,
            )
    for first in range(first_masked, high, TILE_N):
        state = take_keys(
            state,
            query_MD,
            position_M,
            first,
            end,
            table_ptr + row * table_stride,
            keys_ptr,
            values_ptr,
            head,
            scale,
            soft_cap,
            KV_HEADS,
            HEAD_SIZE,
            BLOCK_SIZE,
            CAUSAL,
            WINDOW,
            CAPPED,
            True,
            TILE_N,
            TILE_D,
        )
    max_M, sum_M, total_MD = state

    # If the next kernel started earlier, its instances would occupy multiprocessors that this kernel's instances need.
    launch.let_next_start(EARLY)
    if not IS_SPLIT:
        result_MD = total_MD / sum_M[:, None]
        tl.store(out_MD, result_MD.to(out_ptr.dtype.element_ty), mask=used_MD)
    else:
        part_M = (token_M * (KV_HEADS * GROUP) + head_M) * splits + split
        tl.store(parts_ptr + part_M[:, None] * TILE_D + dim_D[None, :], total_MD, mask=used_M[:, None])
        tl.store(maxima_ptr + part_M, max_M, mask=used_M)
        tl.store(sums_ptr + part_M, sum_M, mask=used_M)


@triton.jit
def take_keys(
    state,
    query_MD,
    position_M,
    first,
    end,
    table_ptr,
    keys_ptr,
    values_ptr,
    head,
    scale,
    soft_cap,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
):
    """Add a tile of keys to the running softmax.

    If MASKED is false, all lanes attend to all keys in the tile, and the head size equals TILE_D.
    """
    position_N = first + tl.arange(0, TILE_N)
    exists_N = position_N < end
    keys_ND, values_ND = load_keys(
        first, exists_N, table_ptr, keys_ptr, values_ptr, head, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, MASKED, TILE_N, TILE_D
    )
    seen_MN = exists_N[None, :]
    if MASKED:
        if CAUSAL:
            seen_MN = seen_MN & (position_N[None, :] <= position_M[:, None])
        if WINDOW > 0:
            seen_MN = seen_MN & (position_N[None, :] > position_M[:, None] - WINDOW)
            if not CAUSAL:
                seen_MN = seen_MN & (position_N[None, :] < position_M[:, None] + WINDOW)
    return take(state, query_MD, keys_ND, values_ND, seen_MN, scale, soft_cap, CAPPED, MASKED)


@triton.jit
def finite(numbers):
    """Replace non-finite elements, as in `attention.operations.finite`."""
    return tl.where(tl.abs(numbers.to(tl.float32)) <= _LARGEST, numbers, 0.0).to(numbers.dtype)


@triton.jit
def load_keys(
    first,
    exists_N,
    table_ptr,
    keys_ptr,
    values_ptr,
    head,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
):
    """Load the keys and values of a tile, all of which are in one KV block."""
    dim_D = tl.arange(0, TILE_D)
    inside_N = tl.arange(0, TILE_N)
    block = tl.load(table_ptr + first // BLOCK_SIZE).to(tl.int64)
    slot_N = block * BLOCK_SIZE + first % BLOCK_SIZE + inside_N
    offset_ND = (slot_N[:, None] * KV_HEADS + head) * HEAD_SIZE + dim_D[None, :]
    if MASKED:
        if HEAD_SIZE == TILE_D:
            exists_ND = exists_N[:, None]
        else:
            exists_ND = exists_N[:, None] & (dim_D < HEAD_SIZE)[None, :]
        keys_ND = tl.load(keys_ptr + offset_ND, mask=exists_ND, other=0.0)
        values_ND = tl.load(values_ptr + offset_ND, mask=exists_ND, other=0.0)
    else:
        keys_ND = tl.load(keys_ptr + offset_ND)
        values_ND = tl.load(values_ptr + offset_ND)
    return keys_ND, values_ND


@triton.jit
def take(
    state,
    query_MD,
    keys_ND,
    values_ND,
    seen_MN,
    scale,
    soft_cap,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add keys and values to the running softmax state: each lane's highest score, sum of weights, and weighted sum of
    values."""
    max_M, sum_M, total_MD = state
    score_MN = tl.dot(query_MD, tl.trans(keys_ND), input_precision="ieee")
    if CAPPED:
        # Compute tanh without libdevice, which Triton's interpreter lacks.
        score_MN = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * (score_MN * scale) / soft_cap) + 1.0)) * _LOG2_E
    else:
        score_MN = score_MN * (scale * _LOG2_E)
    if MASKED:
        score_MN = tl.where(seen_MN, score_MN, LOWEST)
    new_max_M = tl.maximum(max_M, tl.max(score_MN, 1))
    weight_MN = tl.exp2(score_MN - new_max_M[:, None])
    rescale_M = tl.exp2(max_M - new_max_M)
    sum_M = sum_M * rescale_M + tl.sum(weight_MN, 1)
    total_MD = total_MD * rescale_M[:, None]
    total_MD = tl.dot(weight_MN.to(values_ND.dtype), values_ND, total_MD, input_precision="ieee")
    return new_max_M, sum_M, total_MD


@triton.jit(do_not_specialize=["splits"])
def _combine(
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    out_ptr,
    out_stride,
    splits,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.begin(EARLY)
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    split_S = tl.arange(0, TILE_S)
    dim_D = tl.arange(0, TILE_D)
    used_S = split_S < splits
    part_S = (token * HEADS + head) * splits + split_S
    max_S = tl.load(maxima_ptr + part_S, mask=used_S, other=LOWEST)
    # A split without visible keys has the lowest maximum, so its weight is zero if another split has visible keys.
    weight_S = tl.exp2(max_S - tl.max(max_S, 0))
    sum_S = tl.load(sums_ptr + part_S, mask=used_S, other=0.0)
    parts_SD = tl.load(parts_ptr + part_S[:, None] * TILE_D + dim_D[None, :], mask=used_S[:, None], other=0.0)
    result_D = tl.sum(parts_SD * weight_S[:, None], 0) / tl.sum(sum_S * weight_S, 0)
    out_D = out_ptr + token * out_stride + head * HEAD_SIZE + dim_D
    tl.store(out_D, result_D.to(out_ptr.dtype.element_ty), mask=dim_D < HEAD_SIZE)


@triton.jit
def _write(
    key_ptr,
    value_ptr,
    slots_ptr,
    keys_ptr,
    values_ptr,
    key_stride,
    value_stride,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.begin(EARLY)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    inside = tl.arange(0, TILE)
    used = inside < SIZE
    key = finite(tl.load(key_ptr + token * key_stride + inside, mask=used))
    tl.store(keys_ptr + slot * SIZE + inside, key, mask=used)
    value = finite(tl.load(value_ptr + token * value_stride + inside, mask=used))
    tl.store(values_ptr + slot * SIZE + inside, value, mask=used)

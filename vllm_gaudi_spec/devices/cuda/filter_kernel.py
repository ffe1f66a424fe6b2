"""The filters from `sampling/filters.py` in Triton, with one launch and one program instance per position.

Each instance reads its row of logits as often as the search requires, which is about ten times for a language model.
The row stays in the L2 cache. Sums over a row are always computed in the same order, regardless of other rows.

Thresholds are represented as keys: integers that sort in the same order as the float32 logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

_BY_VALUE = tl.constexpr(14)
"""The number of search iterations that divide an interval of logit values, over which real logits are spread. Later
iterations divide an interval of keys."""
_FAR = tl.constexpr(32.0)
"""The maximum distance between the first thresholds and the highest logit."""


@triton.jit
def _key_of(values):
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # makes -0.0 equal 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(values, peak, IS_COUNT: tl.constexpr):
    if IS_COUNT:
        return tl.full(values.shape, 1.0, tl.float32)
    return tl.exp(values - peak)


@triton.jit
def _mass(row, vocab, peak, threshold, CHUNK: tl.constexpr):
    """Return the total probability of the tokens at or above a threshold."""
    offsets = tl.arange(0, CHUNK)
    weight = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, vocab, CHUNK):
        values = tl.load(row + start + offsets, mask=start + offsets < vocab, other=float("-inf"))
        weight += tl.where(values >= threshold, tl.exp(values - peak), 0.0)
    return tl.sum(weight, axis=0)


@triton.jit
def _search(row, vocab, peak, floor, target, IS_COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """Return the largest logit, at least `floor`, for which the tokens at or above it have the probability `target`."""
    offsets = tl.arange(0, CHUNK)
    # Loop invariant: the tokens at or above `low` have enough probability, and those at or above `high` do not.
    low = _key_of(floor).to(tl.int64)
    high = _key_of(peak).to(tl.int64) + 1
    rounds = 0
    while high - low > 1:
        # Choose three thresholds within the interval.
        first, second, third = low + (high - low) // 4, low + (high - low) // 2, low + (high - low) * 3 // 4
        if rounds < _BY_VALUE:
            top = _value_of((high - 1).to(tl.int32))
            bottom = tl.maximum(_value_of(low.to(tl.int32)), top - _FAR)
            step = (top - bottom) * 0.25
            first = _key_of(bottom + step).to(tl.int64)
            second = _key_of(bottom + step * 2.0).to(tl.int64)
            third = _key_of(bottom + step * 3.0).to(tl.int64)
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        second = tl.minimum(tl.maximum(second, low + 1), high - 1)
        third = tl.minimum(tl.maximum(third, low + 1), high - 1)
        first_value = _value_of(first.to(tl.int32))
        second_value = _value_of(second.to(tl.int32))
        third_value = _value_of(third.to(tl.int32))
        low_value, high_value = _value_of(low.to(tl.int32)), _value_of((high - 1).to(tl.int32))
        above_first = tl.zeros((CHUNK,), tl.float32)
        above_second = tl.zeros((CHUNK,), tl.float32)
        above_third = tl.zeros((CHUNK,), tl.float32)
        least = tl.full((CHUNK,), float("inf"), tl.float32)
        largest = tl.full((CHUNK,), float("-inf"), tl.float32)
        for start in range(0, vocab, CHUNK):
            values = tl.load(row + start + offsets, mask=start + offsets < vocab, other=float("-inf"))
            weights = _weights(values, peak, IS_COUNT)
            above_first += tl.where(values >= first_value, weights, 0.0)
            above_second += tl.where(values >= second_value, weights, 0.0)
            above_third += tl.where(values >= third_value, weights, 0.0)
            least = tl.minimum(least, tl.where(values >= low_value, values, float("inf")))
            largest = tl.maximum(largest, tl.where(values <= high_value, values, float("-inf")))
        # Move the ends of the interval to logits that occur in the row.
        low = tl.maximum(low, _key_of(tl.min(least, axis=0)).to(tl.int64))
        high = tl.minimum(high, _key_of(tl.max(largest, axis=0)).to(tl.int64) + 1)
        if tl.sum(above_first, axis=0) >= target:
            low = tl.maximum(low, first)
        else:
            high = tl.minimum(high, first)
        if tl.sum(above_second, axis=0) >= target:
            low = tl.maximum(low, second)
        else:
            high = tl.minimum(high, second)
        if tl.sum(above_third, axis=0) >= target:
            low = tl.maximum(low, third)
        else:
            high = tl.minimum(high, third)
        rounds += 1
    return _value_of(low.to(tl.int32))


# Do not specialize on this argument, so that one compilation works for any number of positions.
@triton.jit(do_not_specialize=["num_positions"])
def filter_kernel(
    logits,
    stride_b,
    stride_q,
    filtered,
    min_p,
    top_k,
    top_k_stride,
    top_p,
    num_sampling,
    vocab,
    num_positions,
    MIN_P: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    SOME: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Copy a row of logits, replacing the logits of excluded tokens with minus infinity.

    If SOME is set, only positions to be sampled are copied.
    """
    position = tl.program_id(0).to(tl.int64)
    b, q = position // num_positions, position % num_positions
    if SOME:
        if q >= tl.load(num_sampling + b):
            return
    row = logits + b * stride_b + q * stride_q
    offsets = tl.arange(0, CHUNK)
    ratio = tl.full((), 0.0, tl.float32)
    k = tl.full((), 1, tl.int32) * vocab
    p = tl.full((), float("inf"), tl.float32)
    if MIN_P:
        ratio = tl.load(min_p + b)
    if TOP_K:
        k = tl.load(top_k + b * top_k_stride)
    if TOP_P:
        p = tl.load(top_p + b)
    floor = tl.full((), float("-inf"), tl.float32)
    if (ratio > 0.0) | (k < vocab) | (p < 1.0):
        best = tl.full((CHUNK,), float("-inf"), tl.float32)
        for start in range(0, vocab, CHUNK):
            values = tl.load(row + start + offsets, mask=start + offsets < vocab, other=float("-inf"))
            best = tl.maximum(best, values)
        peak = tl.max(best, axis=0)
        # Copy a row unchanged if it contains plus infinity or NaN, or if all of its tokens are forbidden.
        if tl.abs(peak) < float("inf"):
            if ratio > 0.0:
                floor = peak + tl.log(ratio)
            if k < vocab:
                lowest = tl.full((), float("-inf"), tl.float32)
                floor = tl.maximum(floor, _search(row, vocab, peak, lowest, k.to(tl.float32), True, CHUNK))
            if p < 1.0:
                target = p * _mass(row, vocab, peak, floor, CHUNK)
                floor = _search(row, vocab, peak, floor, target, False, CHUNK)
    out = filtered + position * vocab
    for start in range(0, vocab, CHUNK):
        mask = start + offsets < vocab
        values = tl.load(row + start + offsets, mask=mask, other=float("-inf"))
        tl.store(out + start + offsets, tl.where(values < floor, float("-inf"), values), mask=mask)

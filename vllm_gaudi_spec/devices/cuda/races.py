"""Triton versions of the noise in `sampling/noise.py`, and "races", which find the argmax of logits plus noise.

A race requires two logarithms per token, which would take longer than loading the logits. Therefore, groups of tokens
are ranked by an upper bound on their best score, which is computed without a logarithm. Exact scores are computed only
for groups that may contain the winner. In nearly all cases, there is only one such group.
"""

from __future__ import annotations

import triton
import triton.language as tl

_STREAM_ACCEPT = tl.constexpr(1)
# The number of tokens scored at once. A larger number would take registers that loads need.
PIECE = tl.constexpr(512)

# --- noise: sampling/noise.py in unsigned integers ---


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def load_keys(keys, key_stride, b):
    low = tl.load(keys + b * key_stride).to(tl.uint32, bitcast=True)
    high = tl.load(keys + b * key_stride + 1).to(tl.uint32, bitcast=True)
    return low, high


@triton.jit
def keys_of_block(low, high, start):
    low = _mix(low ^ _mix(start.to(tl.uint32, bitcast=True) * 0xC2B2AE3D))
    return low, _mix(high + low)


@triton.jit
def hash_position(low, high, position, STREAM: tl.constexpr):
    """Hash everything that determines a token's noise except the token itself."""
    hashed = _mix(position.to(tl.uint32, bitcast=True) * 0x85EBCA6B + STREAM * 0x27D4EB2F)
    first = _mix(hashed ^ low)
    second = _mix(first + high)
    # The last shift of one hash finalizer and the first shift of the next cancel out, except for these bits.
    return first, second ^ (second >> 16)


@triton.jit
def hash_from(first, number):
    """Return `first`, adjusted to token IDs that start at `number`."""
    return first + number.to(tl.uint32, bitcast=True) * 0x9E3779B1


@triton.jit
def _hash_tokens(tokens, first, second):
    x = tokens.to(tl.uint32, bitcast=True) * 0x9E3779B1 + first
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= second
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _unit(hashed):
    """Convert 31 bits to a number in (0, 1]."""
    return (hashed & 0xFFFFFFFE).to(tl.float32) * 2.3283064365386963e-10 + 2.3283064365386963e-10


@triton.jit
def _gumbel(hashed):
    unit = tl.minimum(_unit(hashed), 0.99999994)
    left = 1.0 - unit
    # Compute log1p, where the division compensates for rounding in 1 - unit.
    exponential = tl.where(left == 1.0, unit, -tl.log(left) * (unit / (1.0 - left)))
    return -tl.log(exponential)


@triton.jit
def _rough_gumbel(hashed):
    """Return an upper bound on `_gumbel`. Where the noise is large, the bound is rarely more than 0.1 too high.

    The bound is -log(u), in which u is not rounded up and the bits of the float approximate its base-2 logarithm. The
    caller adds `_ROUGH_OFFSET`.
    """
    return hashed.to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32) * -8.262958294867817e-08


_ROUGH_OFFSET = tl.constexpr(110.21040170884255)


@triton.jit
def uniform(low, high, positions):
    first, second = hash_position(low, high, positions, _STREAM_ACCEPT)
    token_0 = tl.zeros_like(positions)
    return (_hash_tokens(token_0, first, second) >> 8).to(tl.float32) * 5.960464477539063e-08


# --- races ---


@triton.jit
def load_values(row, probs_row, tokens, vocab, from_residual, peak, scale):
    """Load logits, or logarithms of the residual. The residual is the target's probability minus the draft's, or 0."""
    mask = tokens < vocab
    values = tl.load(row + tokens, mask=mask, other=float("-inf")).to(tl.float32)
    if from_residual:
        drafted = tl.load(probs_row + tokens, mask=mask, other=0.0)
        values = tl.log(tl.maximum(tl.exp(values - peak) * scale - drafted, 0.0))
    return values


@triton.jit
def compute_bound(values, tokens, random, first, second):
    """Return an upper bound on the scores along the first dimension."""
    offset = 0.0
    if random:
        values += _rough_gumbel(_hash_tokens(tokens, first, second))
        offset = _ROUGH_OFFSET
    return tl.max(values, axis=0) + offset


@triton.jit
def compute_scores(row, probs_row, tokens, vocab, random, first, second, from_residual, peak, scale):
    values = load_values(row, probs_row, tokens, vocab, from_residual, peak, scale)
    if random:
        values += _gumbel(_hash_tokens(tokens, first, second))
    return values


@triton.jit
def first_best(scores, tokens, vocab):
    top = tl.max(scores, axis=0)
    return top, tl.minimum(tl.min(tl.where(scores == top, tokens, vocab), axis=0), vocab - 1)


@triton.jit
def find_winner(
    row,
    probs_row,
    bounds,
    num_bounds,
    vocab,
    random,
    first,
    second,
    from_residual,
    peak,
    scale,
    SPAN: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_BOUNDS: tl.constexpr,
):
    """Return the token with the best score, and the score. If no token has a score, return token 0 and -inf.

    Each bound covers SPAN tokens: WIDTH adjacent tokens in every STRIDE. Neighboring bounds cover the rest of it.
    """
    bound_indices = tl.arange(0, PADDED_BOUNDS)
    left = tl.load(bounds + bound_indices, mask=bound_indices < num_bounds, other=float("-inf"), cache_modifier=".cg")
    highest, bound_index = tl.max(left, axis=0, return_indices=True)
    best = tl.full((), float("-inf"), tl.float32)
    worth = best
    winner = tl.zeros((), tl.int32)
    while (highest > float("-inf")) & (highest >= worth):
        neighbors: tl.constexpr = STRIDE // WIDTH
        start = bound_index // neighbors * (neighbors * SPAN) + bound_index % neighbors * WIDTH
        size: tl.constexpr = min(SPAN, PIECE)
        scores = tl.full((size,), float("-inf"), tl.float32)
        found = tl.zeros((size,), tl.int32)
        for piece in range(0, SPAN, size):
            at = piece + tl.arange(0, size)
            tokens = start + at // WIDTH * STRIDE + at % WIDTH
            values = compute_scores(row, probs_row, tokens, vocab, random, first, second, from_residual, peak, scale)
            found = tl.where(values > scores, tokens, found)
            scores = tl.maximum(values, scores)
        top, token = first_best(scores, found, vocab)
        if (top > best) | ((top == best) & (token < winner)):
            best = top
            winner = token
        worth = best
        if random:
            # Allow for rounding errors in the bound and the score.
            worth = best - (1e-3 + 1e-6 * tl.abs(best))
        left = tl.where(bound_indices == bound_index, float("-inf"), left)
        highest, bound_index = tl.max(left, axis=0, return_indices=True)
    return winner, best

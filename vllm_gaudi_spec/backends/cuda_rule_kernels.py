"""Triton kernels of the acceptance rules. `cuda_rules.py` calls them; `sample/` is their reference.

A kernel reads its rows once, in chunks, PARTS of them a program. The last program that arrives at a row finishes it,
and the last that finishes a row of a request judges it: launches for the few numbers that are left would cost more than
reading 64 MB of logits does. Who came last is counted in `arrivals`, which is zero before and after a kernel.

A race (the argmax of logits plus noise) needs two logarithms a token, too much for the speed of the memory. So the
chunks are ranked by an upper bound of their best score, which costs none, and the row's finisher looks at those chunks,
and scores those tokens, that can hold the winner: nearly always one.

Names: a row is a place of a request; b counts requests, `vocab` tokens, `num_chunks` chunks of CHUNK tokens a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

_STREAM_ACCEPT = tl.constexpr(1)
_STREAM_TARGET = tl.constexpr(0)
_STREAM_RESIDUAL = tl.constexpr(3)
_LARGEST = tl.constexpr(3.4028234663852886e38)

# --- noise: sample/noise.py in unsigned integers ---


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _keys(keys, key_stride, b):
    low = tl.load(keys + b * key_stride).to(tl.uint32, bitcast=True)
    high = tl.load(keys + b * key_stride + 1).to(tl.uint32, bitcast=True)
    return low, high


@triton.jit
def _keys_of_block(low, high, start):
    low = _mix(low ^ _mix(start.to(tl.uint32, bitcast=True) * 0xC2B2AE3D))
    return low, _mix(high + low)


@triton.jit
def _hash_place(low, high, position, STREAM: tl.constexpr):
    """What the hash of a token needs of everything else."""
    place = _mix(position.to(tl.uint32, bitcast=True) * 0x85EBCA6B + STREAM * 0x27D4EB2F)
    first = _mix(place ^ low)
    second = _mix(first + high)
    # The last shift of one finaliser and the first of the next cancel, but for these bits.
    return first, second ^ (second >> 16)


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
    """In (0, 1], of 31 bits."""
    return (hashed & 0xFFFFFFFE).to(tl.float32) * 2.3283064365386963e-10 + 2.3283064365386963e-10


@triton.jit
def _gumbel(hashed):
    unit = tl.minimum(_unit(hashed), 0.99999994)
    left = 1.0 - unit
    # log1p: the division puts back what was rounded away in 1 - unit.
    exponential = tl.where(left == 1.0, unit, -tl.log(left) * (unit / (1.0 - left)))
    return -tl.log(exponential)


@triton.jit
def _rough_gumbel(hashed):
    """At least `_gumbel` and seldom more than 0.1 above it where it is large: -log(u), with the float's own bits as its
    logarithm to base 2. `_ROUGH_OFFSET` is still to be added."""
    return _unit(hashed).to(tl.int32, bitcast=True).to(tl.float32) * -8.262958294867817e-08


_ROUGH_OFFSET = tl.constexpr(88.02969193111305)


@triton.jit
def _uniform(low, high, positions):
    first, second = _hash_place(low, high, positions, _STREAM_ACCEPT)
    token_0 = tl.zeros_like(positions)
    return (_hash_tokens(token_0, first, second) >> 8).to(tl.float32) * 5.960464477539063e-08


# --- races ---


@triton.jit
def _values(row, law, tokens, vocab, from_residual, peak, scale):
    """Logits, or the logarithms of what the target has more than the drafter's law."""
    mask = tokens < vocab
    values = tl.load(row + tokens, mask=mask, other=float("-inf")).to(tl.float32)
    if from_residual:
        drafted = tl.load(law + tokens, mask=mask, other=0.0)
        values = tl.log(tl.maximum(tl.exp(values - peak) * scale - drafted, 0.0))
    return values


@triton.jit
def _bound(values, tokens, random, first, second):
    """No token of the chunk scores more."""
    offset = 0.0
    if random:
        values += _rough_gumbel(_hash_tokens(tokens, first, second))
        offset = _ROUGH_OFFSET
    return tl.max(values, axis=0) + offset


@triton.jit
def _improve(values, start, random, first, second, best, winner, CHUNK: tl.constexpr):
    """The winner so far, or the chunk's own. Only tokens whose bound leaves them a chance get a real score."""
    tokens = start + tl.arange(0, CHUNK)
    rough = values
    if random:
        rough += _rough_gumbel(_hash_tokens(tokens, first, second)) + _ROUGH_OFFSET
    highest, place = tl.max(rough, axis=0, return_indices=True)
    worth = _worth(best, random)
    while highest > worth:
        token = start + place
        score = highest
        if random:
            value = tl.max(tl.where(tokens == token, values, float("-inf")), axis=0)
            score = value + _gumbel(_hash_tokens(token, first, second))
        if (score > best) | ((score == best) & (token < winner)):
            best = score
            winner = token
        worth = _worth(best, random)
        rough = tl.where(tokens == token, float("-inf"), rough)
        highest, place = tl.max(rough, axis=0, return_indices=True)
    return best, winner


@triton.jit
def _worth(best, random):
    """What a bound must exceed: both it and the best score are rounded."""
    worth = best
    if random:
        worth -= 1e-3 + 1e-6 * tl.abs(best)
    return worth


@triton.jit
def _winner(
    row,
    law,
    bounds,
    num_chunks,
    vocab,
    random,
    first,
    second,
    from_residual,
    peak,
    scale,
    CHUNK: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
):
    """The token with the best score, and that score; token 0 and -inf where no token has one."""
    places = tl.arange(0, PADDED_CHUNKS)
    left = tl.load(bounds + places, mask=places < num_chunks, other=float("-inf"), cache_modifier=".cg")
    highest, chunk = tl.max(left, axis=0, return_indices=True)
    best = tl.full((), float("-inf"), tl.float32)
    winner = tl.zeros((), tl.int32)
    worth = best
    while highest > worth:
        start = chunk * CHUNK
        values = _values(row, law, start + tl.arange(0, CHUNK), vocab, from_residual, peak, scale)
        best, winner = _improve(values, start, random, first, second, best, winner, CHUNK)
        worth = _worth(best, random)
        left = tl.where(places == chunk, float("-inf"), left)
        highest, chunk = tl.max(left, axis=0, return_indices=True)
    return winner, best


@triton.jit
def _is_last(arrivals, expected):
    is_last = tl.atomic_add(arrivals, 1, sem="acq_rel") == expected - 1
    if is_last:
        tl.store(arrivals, 0)
    return is_last


# --- strict ---


# One program for every number of drafts and every vocabulary.
@triton.jit(do_not_specialize=["num_places", "num_chunks"])
def strict_kernel(
    logits,
    stride_b,
    stride_q,
    temperature,
    keys,
    key_stride,
    positions,
    position_stride,
    drafts,
    draft_stride,
    num_drafts,
    bounds,
    row_arrivals,
    arrivals,
    tokens_out,
    num_out,
    vocab,
    num_chunks,
    num_places,
    STREAM: tl.constexpr,
    PARTS: tl.constexpr,
    RANDOM: tl.constexpr,
    JUDGE: tl.constexpr,
    PADDED_PLACES: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
):
    """Sample every place; where it is to JUDGE, count the drafts that equal their samples."""
    chunk, place = tl.program_id(0) * PARTS, tl.program_id(1)
    b, q = place // num_places, place % num_places
    row = logits + b.to(tl.int64) * stride_b + q.to(tl.int64) * stride_q
    own_bounds = bounds + place * num_chunks
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    end = tl.minimum(chunk * CHUNK + PARTS * CHUNK, vocab)
    values = _values(row, row, tokens, end, False, 0.0, 0.0)
    # Barriers keep the compiler from hashing first: logits are under way meanwhile.
    tl.debug_barrier()
    random, first, second = False, 0, 0
    if RANDOM:
        random = tl.load(temperature + b) > 0
        low, high = _keys(keys, key_stride, b)
        position = tl.load(positions + b * position_stride + q)
        first, second = _hash_place(low, high, position, STREAM)
    for part in range(PARTS):
        following = _values(row, row, tokens + CHUNK, end, False, 0.0, 0.0)
        tl.debug_barrier()
        bound = _bound(values, tokens, random, first, second)
        tl.store(own_bounds + chunk + part, bound, mask=chunk + part < num_chunks)
        values = following
        tokens += CHUNK
    if _is_last(row_arrivals + place, tl.num_programs(0)):
        token, _ = _winner(
            row,
            row,
            own_bounds,
            num_chunks,
            vocab,
            random,
            first,
            second,
            False,
            0.0,
            0.0,
            CHUNK,
            PADDED_CHUNKS,
        )
        tl.store(tokens_out + place, token)
        if JUDGE:
            if _is_last(arrivals + b, num_places):
                places = tl.arange(0, PADDED_PLACES)
                is_draft = places < num_places - 1
                sampled = tl.load(tokens_out + b * num_places + places, mask=is_draft, other=-1, cache_modifier=".cg")
                drafted = tl.load(drafts + b * draft_stride + places, mask=is_draft, other=-2)
                equal = (sampled == drafted) & (places < tl.load(num_drafts + b))
                tl.store(num_out + b, tl.min(tl.where(equal, num_places, places), axis=0) + 1)


# --- standard and block ---


@triton.jit(do_not_specialize=["max_drafts", "num_chunks"])
def weigh_kernel(
    logits,
    stride_b,
    stride_q,
    laws,
    law_stride_b,
    law_stride_k,
    drafts,
    draft_stride,
    num_drafts,
    temperature,
    keys,
    key_stride,
    positions,
    position_stride,
    peaks,
    masses,
    row_peaks,
    row_masses,
    ratios,
    row_arrivals,
    arrivals,
    weights,
    num_accepted,
    vocab,
    num_chunks,
    max_drafts,
    BLOCK_RULE: tl.constexpr,
    PADDED_DRAFTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
):
    """The softmax of every draft's place as peak and mass, p / q of every draft; then the standard rule's number of
    accepted drafts, or the block rule's weights. Of greedy rows the ratio says whether the draft is the argmax."""
    chunk, place = tl.program_id(0), tl.program_id(1)
    b, k = place // max_drafts, place % max_drafts
    row = logits + b.to(tl.int64) * stride_b + k.to(tl.int64) * stride_q
    is_real = k < tl.load(num_drafts + b)
    random = tl.load(temperature + b) > 0
    own_peaks, own_masses = peaks + place * num_chunks, masses + place * num_chunks
    if is_real:
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        values = _values(row, row, tokens, vocab, False, 0.0, 0.0)
        peak = tl.max(values, axis=0)
        tl.store(own_peaks + chunk, peak)
        if random:
            mass = tl.sum(tl.exp(values - peak), axis=0)
            tl.store(own_masses + chunk, tl.where(peak > float("-inf"), mass, 0.0))
    if _is_last(row_arrivals + place, num_chunks):
        ratio = 0.0
        draft = tl.load(drafts + b * draft_stride + k)
        is_token = (draft >= 0) & (draft < vocab)
        if is_real:
            if random:
                places = tl.arange(0, PADDED_CHUNKS)
                is_chunk = places < num_chunks
                all_peaks = tl.load(own_peaks + places, mask=is_chunk, other=float("-inf"), cache_modifier=".cg")
                all_masses = tl.load(own_masses + places, mask=is_chunk, other=0.0, cache_modifier=".cg")
                peak = tl.max(all_peaks, axis=0)
                mass = tl.sum(all_masses * tl.exp(all_peaks - peak), axis=0)
                tl.store(row_peaks + place, peak)
                tl.store(row_masses + place, mass)
                if is_token:
                    p = tl.exp(tl.load(row + draft).to(tl.float32) - peak) / mass
                    q = tl.load(laws + b.to(tl.int64) * law_stride_b + k.to(tl.int64) * law_stride_k + draft)
                    if q > 0:
                        ratio = tl.minimum(p / q, _LARGEST)
            else:
                token, _ = _winner(
                    row,
                    row,
                    own_peaks,
                    num_chunks,
                    vocab,
                    False,
                    0,
                    0,
                    False,
                    0.0,
                    0.0,
                    CHUNK,
                    PADDED_CHUNKS,
                )
                if token == draft:
                    ratio = 1.0
        tl.store(ratios + place, ratio)
        if _is_last(arrivals + b, max_drafts):
            places = tl.arange(0, PADDED_DRAFTS)
            is_draft = places < max_drafts
            all_ratios = tl.load(ratios + b * max_drafts + places, mask=is_draft, other=0.0, cache_modifier=".cg")
            if BLOCK_RULE:
                weight = 1.0
                tl.store(weights + b * (max_drafts + 1), weight)
                for before in range(max_drafts):
                    own_ratio = tl.sum(tl.where(places == before, all_ratios, 0.0), axis=0)
                    weight = tl.minimum(weight * own_ratio, 1.0)
                    tl.store(weights + b * (max_drafts + 1) + before + 1, weight)
            else:
                low, high = _keys(keys, key_stride, b)
                position = tl.load(positions + b * position_stride + places, mask=is_draft, other=0)
                accepted = _uniform(low, high, position) < all_ratios
                tl.store(num_accepted + b, tl.min(tl.where(accepted, max_drafts, places), axis=0))


@triton.jit(do_not_specialize=["max_drafts", "num_chunks"])
def block_kernel(
    logits,
    stride_b,
    stride_q,
    laws,
    law_stride_b,
    law_stride_k,
    num_drafts,
    temperature,
    keys,
    key_stride,
    positions,
    position_stride,
    row_peaks,
    row_masses,
    weights,
    surpluses,
    arrivals,
    num_accepted,
    vocab,
    num_chunks,
    max_drafts,
    PADDED_DRAFTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
):
    """The sums of max(w p - q, 0) at the places 1 to K - 1, then the block rule's number of accepted drafts."""
    # Place 1 has programs for K = 1 too, to judge.
    inner = tl.maximum(max_drafts - 1, 1)
    chunk, row = tl.program_id(0), tl.program_id(1)
    b, k = row // inner, 1 + row % inner
    num = tl.load(num_drafts + b)
    random = tl.load(temperature + b) > 0
    own_weights = weights + b * (max_drafts + 1)
    if (k < num) & random:
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        mask = tokens < vocab
        at = logits + b.to(tl.int64) * stride_b + k.to(tl.int64) * stride_q
        values = tl.load(at + tokens, mask=mask, other=float("-inf")).to(tl.float32)
        law = laws + b.to(tl.int64) * law_stride_b + k.to(tl.int64) * law_stride_k
        drafted = tl.load(law + tokens, mask=mask, other=0.0)
        peak = tl.load(row_peaks + b * max_drafts + k)
        scale = tl.load(own_weights + k) / tl.load(row_masses + b * max_drafts + k)
        surplus = tl.sum(tl.maximum(tl.exp(values - peak) * scale - drafted, 0.0), axis=0)
        tl.store(surpluses + (b * max_drafts + k) * num_chunks + chunk, surplus)
    if _is_last(arrivals + b, inner * num_chunks):
        lengths = tl.arange(0, PADDED_DRAFTS) + 1
        has_inner = lengths < tl.where(random, num, 0)
        chunks = tl.arange(0, PADDED_CHUNKS)
        parts = tl.load(
            surpluses + (b * max_drafts + lengths[:, None]) * num_chunks + chunks[None, :],
            mask=has_inner[:, None] & (chunks < num_chunks)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        surplus = tl.sum(parts, axis=1)
        weight = tl.load(own_weights + lengths, mask=lengths <= max_drafts, other=0.0)
        accept = tl.where(surplus > 0, surplus / (surplus + (1.0 - weight)), 0.0)
        accept = tl.where(has_inner, accept, tl.where(lengths <= num, weight, 0.0))
        low, high = _keys(keys, key_stride, b)
        low, high = _keys_of_block(low, high, tl.load(positions + b * position_stride))
        position = tl.load(positions + b * position_stride + lengths - 1, mask=lengths <= max_drafts, other=0)
        accepted = _uniform(low, high, position) < accept
        tl.store(num_accepted + b, tl.max(tl.where(accepted, lengths, 0), axis=0))


@triton.jit(do_not_specialize=["max_drafts", "num_chunks"])
def behind_kernel(
    logits,
    stride_b,
    stride_q,
    laws,
    law_stride_b,
    law_stride_k,
    drafts,
    draft_stride,
    num_drafts,
    temperature,
    keys,
    key_stride,
    positions,
    position_stride,
    row_peaks,
    row_masses,
    weights,
    num_accepted,
    bounds,
    arrivals,
    tokens_out,
    num_out,
    vocab,
    num_chunks,
    max_drafts,
    BLOCK_RULE: tl.constexpr,
    PADDED_PLACES: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
):
    """The token behind the accepted drafts, and the verdict."""
    chunk, b = tl.program_id(0), tl.program_id(1)
    accepted = tl.load(num_accepted + b)
    random = tl.load(temperature + b) > 0
    from_residual = (accepted < tl.load(num_drafts + b)) & random
    row = logits + b.to(tl.int64) * stride_b + accepted.to(tl.int64) * stride_q
    law = laws + b.to(tl.int64) * law_stride_b + tl.minimum(accepted, max_drafts - 1).to(tl.int64) * law_stride_k
    low, high = _keys(keys, key_stride, b)
    position = tl.load(positions + b * position_stride + accepted)
    first, second = _hash_place(low, high, position, _STREAM_TARGET)
    peak, scale = 0.0, 0.0
    if from_residual:
        peak = tl.load(row_peaks + b * max_drafts + accepted)
        scale = 1.0 / tl.load(row_masses + b * max_drafts + accepted)
        if BLOCK_RULE:
            scale *= tl.load(weights + b * (max_drafts + 1) + accepted)
            low, high = _keys_of_block(low, high, tl.load(positions + b * position_stride))
        first, second = _hash_place(low, high, position, _STREAM_RESIDUAL)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    values = _values(row, law, tokens, vocab, from_residual, peak, scale)
    own_bounds = bounds + b * num_chunks
    tl.store(own_bounds + chunk, _bound(values, tokens, random, first, second))
    if _is_last(arrivals + b, num_chunks):
        token, best = _winner(
            row,
            law,
            own_bounds,
            num_chunks,
            vocab,
            random,
            first,
            second,
            from_residual,
            peak,
            scale,
            CHUNK,
            PADDED_CHUNKS,
        )
        if from_residual & (best == float("-inf")):
            # p = q, and only rounding can have led here: the target, read by this program alone.
            low, high = _keys(keys, key_stride, b)
            first, second = _hash_place(low, high, position, _STREAM_TARGET)
            for other in range(num_chunks):
                start = other * CHUNK
                whole = _values(row, law, start + tl.arange(0, CHUNK), vocab, False, 0.0, 0.0)
                best, token = _improve(whole, start, True, first, second, best, token, CHUNK)
        places = tl.arange(0, PADDED_PLACES)
        is_draft = places < max_drafts
        drafted = tl.load(drafts + b * draft_stride + places, mask=is_draft, other=0)
        drafted = tl.minimum(tl.maximum(drafted, 0), vocab - 1)
        told = tl.where((places == accepted) | (places == max_drafts), token, drafted)
        tl.store(tokens_out + b * (max_drafts + 1) + places, told, mask=places <= max_drafts)
        tl.store(num_out + b, accepted + 1)

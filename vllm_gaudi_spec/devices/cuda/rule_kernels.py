"""Triton kernels for the acceptance rules, called by `rules.py`. `sampling/` is the reference implementation.

Each kernel reads its rows once, in chunks, with PARTS chunks per instance. The last instance to arrive at a row
finishes the row, and the last instance to finish one of a request's rows verifies the request. Separate launches for
the few remaining values would take longer than reading 64 MB of logits. `arrivals` counts arrivals and is zero before
and after each kernel. The best token is found by the functions in `races.py`.

Terms: an instance is a Triton program with its own `tl.program_id`; a row is one position in a request; b is the index
of a request, `vocab` is the number of tokens, and `num_chunks` is the number of chunks of CHUNK tokens per row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_gaudi_spec.devices.cuda.races import (
    PIECE,
    compute_bound,
    compute_scores,
    find_winner,
    first_best,
    hash_from,
    hash_position,
    keys_of_block,
    load_keys,
    load_values,
    uniform,
)

_STREAM_TARGET = tl.constexpr(0)
_STREAM_RESIDUAL = tl.constexpr(3)
# An instance that skips its chunks adds this value to the arrivals of its row.
_UNREAD = tl.constexpr(1 << 16)
# If a request ends at position 0, this value is added to the request's arrivals; for position 1, twice this value is
# added, and so on. There is room for 22 positions, and 16 drafts need only 17.
_END = tl.constexpr(1 << 8)
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _is_last(arrivals, expected):
    is_last = tl.atomic_add(arrivals, 1, sem="acq_rel") == expected - 1
    if is_last:
        tl.store(arrivals, 0)
    return is_last


# --- strict ---


# Do not specialize on these arguments, so that one compilation works for all numbers of requests and drafts.
@triton.jit(do_not_specialize=["num_requests", "num_positions", "num_instances"])
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
    num_requests,
    num_positions,
    num_instances,
    STREAM: tl.constexpr,
    RANDOM: tl.constexpr,
    VERIFY: tl.constexpr,
    LOOK: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
    PADDED_BOUNDS: tl.constexpr,
):
    """Sample at every position. If VERIFY is set, also count the drafts that equal their samples.

    The first positions of all requests are processed first. A position ends its request if it has no draft or a wrong
    one. If LOOK is set, instances check whether the request has ended and skip all later positions. In `arrivals`, the
    bits above the number of finished positions mark the positions at which the request ends.
    """
    bounds_each: tl.constexpr = PARTS * CHUNK // SPAN
    part, row_index = tl.program_id(0) % num_instances, tl.program_id(0) // num_instances
    b, q = row_index % num_requests, row_index // num_requests
    row = logits + b.to(tl.int64) * stride_b + q.to(tl.int64) * stride_q
    own_bounds = bounds + row_index * num_instances * bounds_each
    random, first, second = False, 0, 0
    if RANDOM:
        random = tl.load(temperature + b) > 0
        low, high = load_keys(keys, key_stride, b)
        position = tl.load(positions + b * position_stride + q)
        first, second = hash_position(low, high, position, STREAM)
    is_needed = True
    if VERIFY:
        num = tl.load(num_drafts + b)
        is_needed = q <= num
        if LOOK:
            # Other instances may change this value concurrently. An atomic returns the same value to all threads.
            ended = tl.atomic_or(arrivals + b, 0, sem="relaxed") // _END
            is_needed = is_needed & ((ended & ((1 << q) - 1)) == 0)
    arrival = 1 + _UNREAD
    if is_needed:
        start = part * PARTS * CHUNK
        length = tl.minimum(vocab - start, PARTS * CHUNK)
        own_row = row + start
        tokens = tl.arange(0, CHUNK // SPAN)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        bound = tl.full((SPAN,), float("-inf"), tl.float32)
        for begin in range(0, length, CHUNK):
            values = load_values(own_row + begin, own_row, tokens, length - begin, False, 0.0, 0.0)
            own_first = first
            if RANDOM:
                own_first = hash_from(first, start + begin)
            bound = tl.maximum(bound, compute_bound(values, tokens, random, own_first, second))
        # Reduce the bounds so that each one covers SPAN tokens again.
        bound = tl.max(tl.reshape(bound, (bounds_each, SPAN // bounds_each)), axis=1)
        tl.store(own_bounds + part * bounds_each + tl.arange(0, bounds_each), bound)
        arrival = 1
    arrived = tl.atomic_add(row_arrivals + row_index, arrival, sem="acq_rel") + arrival
    if arrived % _UNREAD == num_instances:
        tl.store(row_arrivals + row_index, 0)
        is_read = arrived == num_instances
        token = tl.zeros((), tl.int32)
        if is_read:
            token, _ = find_winner(
                row,
                row,
                own_bounds,
                num_instances * bounds_each,
                vocab,
                random,
                first,
                second,
                False,
                0.0,
                0.0,
                SPAN,
                SPAN,
                SPAN // bounds_each,
                PADDED_BOUNDS,
            )
        tl.store(tokens_out + b * num_positions + q, token)
        if VERIFY:
            drafted = tl.load(drafts + b * draft_stride + q, mask=q < num_positions - 1, other=-1)
            ends = is_read & ((q >= num) | (token != drafted))
            done = 1 + (ends.to(tl.int32) * _END << q)
            done += tl.atomic_add(arrivals + b, done, sem="relaxed")
            if done % _END == num_positions:
                tl.store(arrivals + b, 0)
                offsets = tl.arange(0, 32)
                is_end = (done // _END >> offsets) % 2 > 0
                tl.store(num_out + b, tl.min(tl.where(is_end, offsets, num_positions), axis=0) + 1)


# --- standard and block ---


@triton.jit(do_not_specialize=["max_drafts", "num_chunks"])
def weigh_kernel(
    logits,
    stride_b,
    stride_q,
    draft_probs,
    probs_stride_b,
    probs_stride_k,
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
    """Compute the peak and the sum of the softmax at each draft's position, and the ratio p / q for each draft.

    Then compute the number of accepted drafts for the standard rule, or the weights for the block rule. In greedy rows,
    the ratio is 1 if the draft is the argmax.
    """
    chunk, row_index = tl.program_id(0), tl.program_id(1)
    b, k = row_index // max_drafts, row_index % max_drafts
    row = logits + b.to(tl.int64) * stride_b + k.to(tl.int64) * stride_q
    is_real = k < tl.load(num_drafts + b)
    random = tl.load(temperature + b) > 0
    own_peaks, own_masses = peaks + row_index * num_chunks, masses + row_index * num_chunks
    if is_real:
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        values = load_values(row, row, tokens, vocab, False, 0.0, 0.0)
        peak = tl.max(values, axis=0)
        tl.store(own_peaks + chunk, peak)
        if random:
            mass = tl.sum(tl.exp(values - peak), axis=0)
            tl.store(own_masses + chunk, tl.where(peak > float("-inf"), mass, 0.0))
    if _is_last(row_arrivals + row_index, num_chunks):
        ratio = 0.0
        draft = tl.load(drafts + b * draft_stride + k)
        is_token = (draft >= 0) & (draft < vocab)
        if is_real:
            if random:
                chunks = tl.arange(0, PADDED_CHUNKS)
                is_chunk = chunks < num_chunks
                all_peaks = tl.load(own_peaks + chunks, mask=is_chunk, other=float("-inf"), cache_modifier=".cg")
                all_masses = tl.load(own_masses + chunks, mask=is_chunk, other=0.0, cache_modifier=".cg")
                peak = tl.max(all_peaks, axis=0)
                mass = tl.sum(all_masses * tl.exp(all_peaks - peak), axis=0)
                tl.store(row_peaks + row_index, peak)
                tl.store(row_masses + row_index, mass)
                if is_token:
                    p = tl.exp(tl.load(row + draft).to(tl.float32) - peak) / mass
                    q = tl.load(draft_probs + b.to(tl.int64) * probs_stride_b + k.to(tl.int64) * probs_stride_k + draft)
                    if q > 0:
                        ratio = tl.minimum(p / q, _LARGEST)
            else:
                token, _ = find_winner(
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
                    CHUNK,
                    CHUNK,
                    PADDED_CHUNKS,
                )
                if token == draft:
                    ratio = 1.0
        tl.store(ratios + row_index, ratio)
        if _is_last(arrivals + b, max_drafts):
            offsets = tl.arange(0, PADDED_DRAFTS)
            is_draft = offsets < max_drafts
            all_ratios = tl.load(ratios + b * max_drafts + offsets, mask=is_draft, other=0.0, cache_modifier=".cg")
            if BLOCK_RULE:
                weight = 1.0
                tl.store(weights + b * (max_drafts + 1), weight)
                for before in range(max_drafts):
                    own_ratio = tl.sum(tl.where(offsets == before, all_ratios, 0.0), axis=0)
                    weight = tl.minimum(weight * own_ratio, 1.0)
                    tl.store(weights + b * (max_drafts + 1) + before + 1, weight)
            else:
                low, high = load_keys(keys, key_stride, b)
                position = tl.load(positions + b * position_stride + offsets, mask=is_draft, other=0)
                accepted = uniform(low, high, position) < all_ratios
                tl.store(num_accepted + b, tl.min(tl.where(accepted, max_drafts, offsets), axis=0))


@triton.jit(do_not_specialize=["max_drafts", "num_chunks"])
def block_kernel(
    logits,
    stride_b,
    stride_q,
    draft_probs,
    probs_stride_b,
    probs_stride_k,
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
    """Compute the sums of max(w p - q, 0) at positions 1 to K - 1, and then the block rule's number of accepted
    drafts."""
    # Position 1 has instances even if K is 1, because they verify the request.
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
        probs_row = draft_probs + b.to(tl.int64) * probs_stride_b + k.to(tl.int64) * probs_stride_k
        drafted = tl.load(probs_row + tokens, mask=mask, other=0.0)
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
        low, high = load_keys(keys, key_stride, b)
        low, high = keys_of_block(low, high, tl.load(positions + b * position_stride))
        position = tl.load(positions + b * position_stride + lengths - 1, mask=lengths <= max_drafts, other=0)
        accepted = uniform(low, high, position) < accept
        tl.store(num_accepted + b, tl.max(tl.where(accepted, lengths, 0), axis=0))


@triton.jit(do_not_specialize=["max_drafts", "num_chunks"])
def next_token_kernel(
    logits,
    stride_b,
    stride_q,
    draft_probs,
    probs_stride_b,
    probs_stride_k,
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
    PADDED_POSITIONS: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
):
    """Sample the token after the accepted drafts and store the verification results."""
    chunk, b = tl.program_id(0), tl.program_id(1)
    accepted = tl.load(num_accepted + b)
    random = tl.load(temperature + b) > 0
    from_residual = (accepted < tl.load(num_drafts + b)) & random
    row = logits + b.to(tl.int64) * stride_b + accepted.to(tl.int64) * stride_q
    probs_row = (
        draft_probs
        + b.to(tl.int64) * probs_stride_b
        + tl.minimum(accepted, max_drafts - 1).to(tl.int64) * probs_stride_k
    )
    low, high = load_keys(keys, key_stride, b)
    position = tl.load(positions + b * position_stride + accepted)
    first, second = hash_position(low, high, position, _STREAM_TARGET)
    peak, scale = 0.0, 0.0
    if from_residual:
        peak = tl.load(row_peaks + b * max_drafts + accepted)
        scale = 1.0 / tl.load(row_masses + b * max_drafts + accepted)
        if BLOCK_RULE:
            scale *= tl.load(weights + b * (max_drafts + 1) + accepted)
            low, high = keys_of_block(low, high, tl.load(positions + b * position_stride))
        first, second = hash_position(low, high, position, _STREAM_RESIDUAL)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    values = load_values(row, probs_row, tokens, vocab, from_residual, peak, scale)
    own_bounds = bounds + b * num_chunks
    tl.store(own_bounds + chunk, compute_bound(values, tokens, random, first, second))
    if _is_last(arrivals + b, num_chunks):
        token, best = find_winner(
            row,
            probs_row,
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
            CHUNK,
            CHUNK,
            PADDED_CHUNKS,
        )
        if from_residual & (best == float("-inf")):
            # Here, p equals q up to rounding. Sample from the target's distribution, which this instance reads again.
            low, high = load_keys(keys, key_stride, b)
            first, second = hash_position(low, high, position, _STREAM_TARGET)
            for start in range(0, vocab, PIECE):
                piece = start + tl.arange(0, PIECE)
                scores = compute_scores(row, probs_row, piece, vocab, True, first, second, False, 0.0, 0.0)
                top, candidate = first_best(scores, piece, vocab)
                if top > best:
                    best = top
                    token = candidate
        offsets = tl.arange(0, PADDED_POSITIONS)
        is_draft = offsets < max_drafts
        drafted = tl.load(drafts + b * draft_stride + offsets, mask=is_draft, other=0)
        drafted = tl.minimum(tl.maximum(drafted, 0), vocab - 1)
        output_ids = tl.where((offsets == accepted) | (offsets == max_drafts), token, drafted)
        tl.store(tokens_out + b * (max_drafts + 1) + offsets, output_ids, mask=offsets <= max_drafts)
        tl.store(num_out + b, accepted + 1)

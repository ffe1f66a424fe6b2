"""Triton kernels, called by `rules.py`, that find a drafter's best token and detect rows with NaN or plus infinity."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_gaudi_spec.devices.cuda.races import first_best, load_values

# An instance whose chunk contains NaN or plus infinity adds this value to the arrivals of its row.
_UNSOUND = tl.constexpr(1 << 16)


@triton.jit
def sound_kernel(logits, stride, sound_out, vocab, num_chunks, CHUNK: tl.constexpr):
    """Check whether a chunk of a row contains NaN or plus infinity."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row.to(tl.int64) * stride + tokens, mask=tokens < vocab, other=0.0)
    tl.store(sound_out + row * num_chunks + chunk, tl.sum(values, 0) < float("inf"))


@triton.jit
def sound_argmax_kernel(
    logits,
    stride,
    tops,
    found,
    row_arrivals,
    tokens_out,
    sound_out,
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
):
    """Find the best token in a row, and check whether the row contains NaN or plus infinity."""
    chunk, row_index = tl.program_id(0), tl.program_id(1)
    row = logits + row_index.to(tl.int64) * stride
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    values = load_values(row, row, tokens, vocab, False, 0.0, 0.0)
    top, token = first_best(values, tokens, vocab)
    own_tops, own_found = tops + row_index * num_chunks, found + row_index * num_chunks
    tl.store(own_tops + chunk, top)
    tl.store(own_found + chunk, token)
    # Masked lanes after the last token load minus infinity, which is valid.
    arrival = tl.where(tl.sum(values, 0) < float("inf"), 1, 1 + _UNSOUND)
    # All threads must have stored their results before the arrival is counted.
    tl.debug_barrier()
    arrived = tl.atomic_add(row_arrivals + row_index, arrival, sem="acq_rel") + arrival
    if arrived % _UNSOUND == num_chunks:
        tl.store(row_arrivals + row_index, 0)
        chunks = tl.arange(0, PADDED_CHUNKS)
        is_chunk = chunks < num_chunks
        highest = tl.load(own_tops + chunks, mask=is_chunk, other=float("-inf"), cache_modifier=".cg")
        token = tl.load(own_found + chunks, mask=is_chunk, other=0, cache_modifier=".cg")
        # If several tokens have the highest logit, choose the first.
        token = tl.min(tl.where(highest == tl.max(highest, 0), token, vocab - 1), 0)
        tl.store(tokens_out + row_index, token)
        tl.store(sound_out + row_index, arrived == num_chunks)

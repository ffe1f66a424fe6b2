"""Sampling and acceptance on a GPU, with Triton versions of the functions in `sampling/`.

Each function takes one to three kernel launches.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton

from vllm_gaudi_spec.devices.cuda import rule_kernels as kernels
from vllm_gaudi_spec.devices.cuda import sound_kernels
from vllm_gaudi_spec.devices.cuda.filter_kernel import filter_kernel
from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling.noise import Stream
from vllm_gaudi_spec.sampling.rules.registry import TORCH

# The maximum number of rows of logits per call, which is the limit for a grid's second dimension.
_MOST_ROWS = 65535
# The number of tokens per chunk for rules with draft probabilities. The first size keeps enough loads in flight. The
# second, smaller size is for calls that would otherwise leave multiprocessors idle.
_PROBS_CHUNK, _SMALL_CHUNK = 2048, 1024
_FEW_INSTANCES = 512
# The number of tokens that each score bound covers.
_SPAN = 256
_WARPS = 2
# Settings for filtering a row, which were the fastest of eight on an H100 with few rows.
_FILTER_CHUNK, _FILTER_WARPS = 8192, 16
# The number of drafter logits that one instance checks and searches for the best token.
_SOUND_CHUNK = 4096
# Minimum padded numbers of positions, chunks, and bounds, which limit the number of compiled kernels.
_POSITIONS, _CHUNKS, _BOUNDS = 8, 256, 256


def _round_up(number: int, least: int) -> int:
    return max(triton.next_power_of_2(number), least)


class _Chunks(NamedTuple):
    size: int
    number: int

    @classmethod
    def choose(cls, rows: int, vocab: int, usual: int) -> _Chunks:
        size = usual if rows * vocab >= _FEW_INSTANCES * usual else _SMALL_CHUNK
        return cls(size, triton.cdiv(vocab, size))

    def settings(self) -> dict[str, int]:
        return {"CHUNK": self.size, "PADDED_CHUNKS": _round_up(self.number, _CHUNKS), "num_warps": _WARPS}


class _Work(NamedTuple):
    """The configuration of a sampling kernel, such as the chunks and registers of each program instance."""

    chunk: int
    parts: int
    registers: int
    waves: bool
    """Whether instances run in several waves, so that later instances can use the results of earlier ones."""

    @classmethod
    def choose(cls, rows: int, vocab: int) -> _Work:
        # With 48 registers per thread, 21 instances fit on each of an H200's 132 multiprocessors. On other GPUs, this
        # choice may be slower but is still correct. A small second wave would take as long as the first, so use the
        # largest instances that form either one wave or many waves and give every multiprocessor some work.
        num_instances = rows * triton.cdiv(vocab, 8192)
        if num_instances > 8192:
            return cls(1024, 8, 64, True)
        if num_instances > 21 * 132:
            return cls(512, 8, 48, True)
        parts = next(parts for parts in (16, 8, 4, 2, 1) if parts == 1 or num_instances * 16 >= 8 * 132 * parts)
        return cls(512, parts, 48, False)


@cache
def _make_counters(device: torch.device) -> tuple[torch.Tensor, ...]:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("sampling and acceptance must run once before they are captured")
    return torch.zeros(2, _MOST_ROWS, dtype=torch.int32, device=device).unbind(0)


def _get_arrivals(device: torch.device, rows: int) -> tuple[torch.Tensor, ...]:
    """Return the arrival counters for rows and requests.

    Kernels on the same stream share the counters and reset them to zero.
    """
    if rows > _MOST_ROWS:
        raise ValueError(
            f"a step samples at most {_MOST_ROWS} rows of logits on a GPU, not {rows}: fewer requests or drafts"
        )
    return _make_counters(device)


def _strict(
    logits_BQV: torch.Tensor,
    drafts_BK: torch.Tensor | None,
    num_drafts_B: torch.Tensor | None,
    temperature_B: torch.Tensor | None,
    keys_B2: torch.Tensor | None,
    positions_BQ: torch.Tensor | None,
    stream: Stream = Stream.TARGET,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples and each row's number of valid tokens, which is uninitialized if there are no drafts to
    verify."""
    rows, num_positions, vocab = logits_BQV.shape
    work = _Work.choose(rows * num_positions, vocab)
    num_instances = triton.cdiv(vocab, work.parts * work.chunk)
    num_bounds = num_instances * work.parts * work.chunk // _SPAN
    bounds = logits_BQV.new_empty(rows * num_positions, num_bounds, dtype=torch.float32)
    sampled_BQ = logits_BQV.new_empty(rows, num_positions, dtype=torch.int32)
    num_sampled_B = logits_BQV.new_empty(rows, dtype=torch.int32)
    kernels.strict_kernel[(num_instances * rows * num_positions,)](
        logits_BQV,
        *logits_BQV.stride()[:2],
        temperature_B,
        keys_B2,
        0 if keys_B2 is None else keys_B2.stride(0),
        positions_BQ,
        0 if positions_BQ is None else positions_BQ.stride(0),
        drafts_BK,
        0 if drafts_BK is None else drafts_BK.stride(0),
        num_drafts_B,
        bounds,
        *_get_arrivals(logits_BQV.device, rows * num_positions),
        sampled_BQ,
        num_sampled_B,
        vocab,
        rows,
        num_positions,
        num_instances,
        STREAM=int(stream),
        RANDOM=temperature_B is not None,
        VERIFY=drafts_BK is not None,
        LOOK=work.waves,
        PARTS=work.parts,
        CHUNK=work.chunk,
        SPAN=_SPAN,
        PADDED_BOUNDS=_round_up(num_bounds, _BOUNDS),
        num_warps=_WARPS,
        maxnreg=work.registers,
    )
    return sampled_BQ, num_sampled_B


def sample_greedy(logits_BQV: torch.Tensor) -> torch.Tensor:
    return _strict(logits_BQV, None, None, None, None, None)[0]


def sample_random(
    logits_BQV: torch.Tensor,
    temperature_B: torch.Tensor,
    keys_B2: torch.Tensor,
    positions_BQ: torch.Tensor,
    stream: Stream = Stream.TARGET,
) -> torch.Tensor:
    return _strict(logits_BQV, None, None, temperature_B, keys_B2, positions_BQ, stream)[0]


def strict_greedy(logits_BQV: torch.Tensor, drafts_BK: torch.Tensor, num_drafts_B: torch.Tensor) -> Verification:
    return Verification(*_strict(logits_BQV, drafts_BK, num_drafts_B, None, None, None))


def strict_random(
    logits_BQV: torch.Tensor,
    drafts_BK: torch.Tensor,
    num_drafts_B: torch.Tensor,
    temperature_B: torch.Tensor,
    keys_B2: torch.Tensor,
    positions_BQ: torch.Tensor,
) -> Verification:
    return Verification(*_strict(logits_BQV, drafts_BK, num_drafts_B, temperature_B, keys_B2, positions_BQ))


def _verify_with_probs(
    is_block: bool,
    logits_BQV: torch.Tensor,
    draft_probs_BKV: torch.Tensor,
    drafts_BK: torch.Tensor,
    num_drafts_B: torch.Tensor,
    temperature_B: torch.Tensor,
    keys_B2: torch.Tensor,
    positions_BQ: torch.Tensor,
) -> Verification:
    rows, num_drafts = drafts_BK.shape
    vocab = logits_BQV.shape[2]
    row_arrivals, arrivals = _get_arrivals(logits_BQV.device, rows * (num_drafts + 1))
    logits = logits_BQV, *logits_BQV.stride()[:2]
    draft_probs = draft_probs_BKV, *draft_probs_BKV.stride()[:2]
    drafts = drafts_BK, drafts_BK.stride(0), num_drafts_B
    noise = temperature_B, keys_B2, keys_B2.stride(0), positions_BQ, positions_BQ.stride(0)
    padded_drafts = _round_up(num_drafts, _POSITIONS)
    peaks_BK, masses_BK, ratios_BK = logits_BQV.new_empty(3, rows, num_drafts, dtype=torch.float32).unbind(0)
    weights_BQ = logits_BQV.new_empty(rows, num_drafts + 1, dtype=torch.float32)
    num_accepted_B, num_sampled_B = logits_BQV.new_empty(2, rows, dtype=torch.int32).unbind(0)
    tokens_BQ = logits_BQV.new_empty(rows, num_drafts + 1, dtype=torch.int32)

    chunks = _Chunks.choose(rows * num_drafts, vocab, _PROBS_CHUNK)
    parts = logits_BQV.new_empty(2, rows * num_drafts, chunks.number, dtype=torch.float32)
    kernels.weigh_kernel[(chunks.number, rows * num_drafts)](
        *logits,
        *draft_probs,
        *drafts,
        *noise,
        *parts.unbind(0),
        peaks_BK,
        masses_BK,
        ratios_BK,
        row_arrivals,
        arrivals,
        weights_BQ,
        num_accepted_B,
        vocab,
        chunks.number,
        num_drafts,
        BLOCK_RULE=is_block,
        PADDED_DRAFTS=padded_drafts,
        **chunks.settings(),
    )
    if is_block:
        kernels.block_kernel[(chunks.number, rows * max(num_drafts - 1, 1))](
            *logits,
            *draft_probs,
            num_drafts_B,
            *noise,
            peaks_BK,
            masses_BK,
            weights_BQ,
            parts[0],
            arrivals,
            num_accepted_B,
            vocab,
            chunks.number,
            num_drafts,
            PADDED_DRAFTS=padded_drafts,
            **chunks.settings(),
        )
    chunks = _Chunks.choose(rows, vocab, _PROBS_CHUNK)
    kernels.next_token_kernel[(chunks.number, rows)](
        *logits,
        *draft_probs,
        *drafts,
        *noise,
        peaks_BK,
        masses_BK,
        weights_BQ,
        num_accepted_B,
        logits_BQV.new_empty(rows, chunks.number, dtype=torch.float32),
        arrivals,
        tokens_BQ,
        num_sampled_B,
        vocab,
        chunks.number,
        num_drafts,
        BLOCK_RULE=is_block,
        PADDED_POSITIONS=_round_up(num_drafts + 1, _POSITIONS),
        **chunks.settings(),
    )
    return Verification(tokens_BQ, num_sampled_B)


def standard(*inputs: torch.Tensor) -> Verification:
    return _verify_with_probs(False, *inputs)


def block(*inputs: torch.Tensor) -> Verification:
    return _verify_with_probs(True, *inputs)


def are_sound(logits_BV: torch.Tensor) -> torch.Tensor:
    rows, vocab = logits_BV.shape
    chunks = triton.cdiv(vocab, _SOUND_CHUNK)
    sound_BN = torch.empty(rows, chunks, dtype=torch.bool, device=logits_BV.device)
    sound_kernels.sound_kernel[(chunks, rows)](
        logits_BV, logits_BV.stride(0), sound_BN, vocab, chunks, CHUNK=_SOUND_CHUNK
    )
    return sound_BN.all(-1)


def sound_argmax(logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocab = logits_BV.shape
    chunks = triton.cdiv(vocab, _SOUND_CHUNK)
    tops_BN = torch.empty(rows, chunks, dtype=torch.float32, device=logits_BV.device)
    found_BN = torch.empty_like(tops_BN, dtype=torch.int32)
    tokens_B = torch.empty(rows, dtype=torch.int32, device=logits_BV.device)
    sound_B = torch.empty_like(tokens_B, dtype=torch.bool)
    sound_kernels.sound_argmax_kernel[(chunks, rows)](
        logits_BV,
        logits_BV.stride(0),
        tops_BN,
        found_BN,
        _get_arrivals(logits_BV.device, rows)[0],
        tokens_B,
        sound_B,
        vocab,
        chunks,
        CHUNK=_SOUND_CHUNK,
        PADDED_CHUNKS=_round_up(chunks, _CHUNKS),
    )
    return tokens_B, sound_B


def filter_logits(
    logits_BQV: torch.Tensor,
    min_p_B: torch.Tensor | None,
    top_k_B: torch.Tensor | None,
    top_p_B: torch.Tensor | None,
    longest: int = 0,
    num_sampling_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Filter logits like `filters.filter_logits`. `longest` is not used, because the search works for any k."""
    rows, num_positions, vocab = logits_BQV.shape
    filtered_BQV = logits_BQV.new_empty(logits_BQV.shape)
    filter_kernel[(rows * num_positions,)](
        logits_BQV,
        *logits_BQV.stride()[:2],
        filtered_BQV,
        min_p_B,
        top_k_B,
        0 if top_k_B is None else top_k_B.stride(0),
        top_p_B,
        num_sampling_B,
        vocab,
        num_positions,
        MIN_P=min_p_B is not None,
        TOP_K=top_k_B is not None,
        TOP_P=top_p_B is not None,
        SOME=num_sampling_B is not None,
        CHUNK=_FILTER_CHUNK,
        num_warps=_FILTER_WARPS,
    )
    return filtered_BQV


RULES = TORCH._replace(
    are_sound=are_sound,
    filter_logits=filter_logits,
    sample_greedy=sample_greedy,
    sample_random=sample_random,
    sound_argmax=sound_argmax,
    strict_greedy=strict_greedy,
    strict_random=strict_random,
    verify={**TORCH.verify, "standard": standard, "block": block},
)

"""Sampling on a CPU, with faster versions of the functions in `sampling/` that do only the work that each row needs.

They use NumPy, which finds maxima with vector instructions, whereas torch does not. N: positions. V: vocabulary size.
C: number of best tokens considered at a position.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling import filters
from vllm_gaudi_spec.sampling.noise import Stream, gumbel
from vllm_gaudi_spec.sampling.rules import strict
from vllm_gaudi_spec.sampling.rules.registry import TORCH

_NEG_INF = np.float32(-np.inf)
_LISTS = (1024, 16384)
"""The numbers of best tokens to try before all tokens are sorted. The first number is enough for most positions."""
_FEW = 8
"""If more than one in this many tokens remains after filtering, noise is computed for all tokens, because finding the
remaining ones takes time."""


def sample_greedy(logits_BQV: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(logits_BQV.numpy().argmax(-1)).int()


def sound_argmax(logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits_BV = logits_BV.float()
    return sample_greedy(logits_BV), TORCH.are_sound(logits_BV)


def sample_random(
    logits_BQV: torch.Tensor,
    temperature_B: torch.Tensor,
    keys_B2: torch.Tensor,
    positions_BQ: torch.Tensor,
    stream: Stream = Stream.TARGET,
) -> torch.Tensor:
    """Sample like `strict.sample_random`, but compute noise only for the tokens that remain after filtering if they are
    few."""
    num_rows, num_positions, vocab = logits_BQV.shape
    logits_NV = logits_BQV.reshape(-1, vocab).numpy()
    which = np.flatnonzero(logits_NV > _NEG_INF)
    row_T, token_T = np.divmod(which, vocab)
    counts_N = np.bincount(row_T, minlength=len(logits_NV))
    if len(which) * _FEW > logits_NV.size or not counts_N.all():
        return strict.sample_random(logits_BQV, temperature_B, keys_B2, positions_BQ, stream)
    row_in_batch_T = torch.from_numpy(row_T // num_positions)
    noise_T = gumbel(
        keys_B2.index_select(0, row_in_batch_T),
        positions_BQ.reshape(-1).index_select(0, torch.from_numpy(row_T))[:, None],
        stream,
        torch.from_numpy(token_T).int()[:, None, None],
    ).flatten()
    noise_T.mul_((temperature_B > 0).index_select(0, row_in_batch_T))
    scores_T = noise_T.numpy() + logits_NV.reshape(-1)[which]
    starts_N = np.concatenate(([0], counts_N.cumsum()[:-1]))
    best_N = np.maximum.reduceat(scores_T, starts_N)
    tokens_T = np.where(scores_T == best_N[row_T], token_T, vocab)
    sampled_N = np.minimum(np.minimum.reduceat(tokens_T, starts_N), vocab - 1)  # clamped in case a score is NaN
    return torch.from_numpy(sampled_N.reshape(num_rows, num_positions)).int()


def strict_greedy(logits_BQV: torch.Tensor, drafts_BK: torch.Tensor, num_drafts_B: torch.Tensor) -> Verification:
    return strict.verify(sample_greedy(logits_BQV), drafts_BK, num_drafts_B)


def strict_random(
    logits_BQV: torch.Tensor,
    drafts_BK: torch.Tensor,
    num_drafts_B: torch.Tensor,
    temperature_B: torch.Tensor,
    keys_B2: torch.Tensor,
    positions_BQ: torch.Tensor,
) -> Verification:
    return strict.verify(sample_random(logits_BQV, temperature_B, keys_B2, positions_BQ), drafts_BK, num_drafts_B)


def filter_logits(
    logits_BQV: torch.Tensor,
    min_p_B: torch.Tensor | None,
    top_k_B: torch.Tensor | None,
    top_p_B: torch.Tensor | None,
    longest: int = 0,
    num_sampling_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Filter logits like `filters.filter_logits`, but sort all tokens only at positions where the best ones do not
    suffice."""
    num_rows, num_positions, vocab = logits_BQV.shape
    logits_NV = logits_BQV.reshape(-1, vocab)

    def by_position(values_B: torch.Tensor | None, off: float) -> np.ndarray:
        if values_B is None:
            return np.full(len(logits_NV), off)
        return values_B.repeat_interleave(num_positions).numpy()

    asked = _Asked(by_position(min_p_B, 0), by_position(top_k_B, vocab), by_position(top_p_B, np.inf))
    if num_sampling_B is not None:
        asked.leave_out((torch.arange(num_positions) >= num_sampling_B[:, None]).flatten().numpy(), vocab)
    floor_N = _find_floors(logits_NV, asked, vocab)
    filtered_NV = torch.empty_like(logits_NV)
    # Use `threshold`, which is vectorized, unlike `where`. It keeps values above a limit, so lower the floor slightly.
    below_N = np.nextafter(floor_N, _NEG_INF).tolist()
    for logits_V, below, filtered_V in zip(logits_NV, below_N, filtered_NV, strict=True):
        torch.ops.aten.threshold.out(logits_V, below, filters.NEG_INF, out=filtered_V)
    return filtered_NV.view(num_rows, num_positions, vocab)


class _Asked(NamedTuple):
    min_p_N: np.ndarray
    top_k_N: np.ndarray
    top_p_N: np.ndarray

    def leave_out(self, which: np.ndarray, vocab: int) -> None:
        for values, off in zip(self, (0, vocab, np.inf), strict=True):
            values[which] = off

    def of(self, which: np.ndarray) -> _Asked:
        return _Asked(*(values[which] for values in self))


def _select_rows(logits_NV: torch.Tensor, which: np.ndarray) -> torch.Tensor:
    return logits_NV if len(which) == len(logits_NV) else logits_NV.index_select(0, torch.from_numpy(which))


def _find_floors(logits_NV: torch.Tensor, asked: _Asked, vocab: int) -> np.ndarray:
    """Return the smallest logit that each row keeps, float32 [N]."""
    is_searched_N = (asked.top_k_N < vocab) | (asked.top_p_N < 1)
    floor_N = np.full(len(logits_NV), _NEG_INF)
    if len(which := np.flatnonzero(~is_searched_N & (asked.min_p_N > 0))):
        floor_N[which] = _select_rows(logits_NV, which).numpy().max(-1) + np.log(asked.min_p_N[which], dtype=np.float32)
    which = np.flatnonzero(is_searched_N)
    for length in (*(length for length in _LISTS if length < vocab), vocab):
        if not len(which):
            break
        found, is_found = _find_floors_in_list(_select_rows(logits_NV, which), asked.of(which), length)
        floor_N[which[is_found]] = found[is_found]
        which = which[~is_found]
    return floor_N


def _find_floors_in_list(logits_NV: torch.Tensor, asked: _Asked, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the floors according to the `length` best logits, and for each row whether these logits are sufficient."""
    vocab = logits_NV.shape[1]
    values_NV = logits_NV.numpy()
    if length < vocab:
        values_NV = np.partition(values_NV, vocab - length, axis=-1)[:, vocab - length :]
    best_NC = np.sort(values_NV, axis=-1)[:, ::-1]
    peak_N1 = np.maximum(best_NC[:, :1], np.finfo(np.float32).min)
    with np.errstate(divide="ignore"):
        floor_N1 = peak_N1 + np.log(asked.min_p_N, dtype=np.float32)[:, None]
    top_k_N1 = asked.top_k_N[:, None]
    kth_N1 = np.take_along_axis(best_NC, np.minimum(top_k_N1, length) - 1, axis=-1)
    floor_N1 = np.where(top_k_N1 < vocab, np.maximum(floor_N1, kth_N1), floor_N1)
    # The list contains all logits above its last one, but possibly not all that are equal to it.
    is_whole_N = (floor_N1[:, 0] > best_NC[:, -1]) | (length == vocab)
    with np.errstate(over="ignore", invalid="ignore"):
        weights_NC = np.where(best_NC >= floor_N1, np.exp(best_NC - peak_N1), 0)
    reached_NC = weights_NC.cumsum(-1, dtype=np.float64)
    mass_N = reached_NC[:, -1].copy()
    is_limited_N = asked.top_p_N < 1
    if len(beyond := np.flatnonzero(is_limited_N & ~is_whole_N)):
        mass_N[beyond] = _sum_mass(logits_NV, beyond, peak_N1[beyond], floor_N1[beyond])
    target_N = np.where(is_limited_N, asked.top_p_N, 1) * mass_N
    enough_N = (reached_NC < target_N[:, None]).sum(-1)
    last_N1 = np.take_along_axis(best_NC, np.minimum(enough_N, length - 1)[:, None], axis=-1)
    floor_N1 = np.where(is_limited_N[:, None], np.maximum(floor_N1, last_N1), floor_N1)
    is_found_N = is_whole_N | ((asked.top_k_N >= vocab) & (enough_N < length))
    return floor_N1[:, 0], is_found_N


def _sum_mass(logits_NV: torch.Tensor, which: np.ndarray, peak_N1: np.ndarray, floor_N1: np.ndarray) -> np.ndarray:
    """Return the total unnormalized probability of the tokens at or above the floors of the selected rows."""
    rows = _select_rows(logits_NV, which)
    weights = (rows - torch.from_numpy(peak_N1)).exp_()
    if (floor_N1 > _NEG_INF).any():
        weights.masked_fill_(rows < torch.from_numpy(floor_N1), 0)
    return weights.sum(-1).double().numpy()


RULES = TORCH._replace(
    sample_greedy=sample_greedy,
    sample_random=sample_random,
    sound_argmax=sound_argmax,
    strict_greedy=strict_greedy,
    strict_random=strict_random,
    filter_logits=filter_logits,
)

"""Top-k, top-p and min-p filters: the tokens of a position that may be sampled.

Each filter is a threshold on a position's logits, and so is their combination: min-p by the probability of the most
likely token, top-k by the k-th largest logit, top-p by where the cumulative probability reaches p, among the tokens
that the other two keep. Tokens with equal logits are kept or removed together; the most likely ones are always kept.

Exactness: the kept tokens equal those of a sort in float64, except where a cumulative probability lies within
`ROUNDING` of p. There the next token may be kept or not, independently of other rows.

N positions, V vocabulary size, G blocks of S tokens, M thresholds that are tried together.
"""

from __future__ import annotations

import torch
from torch.nn import functional

NEG_INF = float("-inf")
ROUNDING = 4e-6
"""Relative error of float32 sums over a vocabulary."""

_BLOCK, _RUN, _FAN = 512, 64, 8
"""Sizes of a sorted block, of its eight runs, and of the eight parts of a run."""
_TRIED = 3
"""Thresholds per round, which decide two bits of the logits."""
_NUM_POWERS, _FRACTION_BITS = 254, 23
"""The number of powers of two among normal float32, and the bits of a fraction between two of them."""
_LIST_BLOCK = 128
"""Number of tokens; common vocabulary sizes are multiples of it."""


def filter_logits(
    logits_BQV: torch.Tensor,
    min_p_B: torch.Tensor | None,
    top_k_B: torch.Tensor | None,
    top_p_B: torch.Tensor | None,
    longest: int = 0,
    num_sampling_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mask the tokens that the filters remove.

    A filter is None if no row uses it; a row without it has min-p 0, k = V, or p = inf.

    Args:
        longest: Largest k of any row with k < V; rows with k = V then have no top-p. 0 if rows may have any k.
        num_sampling_B: Number of positions of each row that are sampled. A device may leave the others undefined.
    """
    if longest:
        if min_p_B is not None:
            logits_BQV = apply_min_p(logits_BQV, min_p_B)
        assert top_k_B is not None
        return apply_list(logits_BQV, top_k_B, top_p_B, longest)
    if top_k_B is None and top_p_B is None:
        return logits_BQV if min_p_B is None else apply_min_p(logits_BQV, min_p_B)
    return search(logits_BQV, min_p_B, top_k_B, top_p_B)


def apply_min_p(logits_BQV: torch.Tensor, min_p_B: torch.Tensor) -> torch.Tensor:
    """Mask tokens less likely than `min_p` times the most likely one; 0 disables the filter (log 0 is -inf)."""
    floor = logits_BQV.amax(-1, keepdim=True) + min_p_B.log()[:, None, None]
    return logits_BQV.masked_fill(logits_BQV < floor, NEG_INF)


def apply_list(
    logits_BQV: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor | None, longest: int
) -> torch.Tensor:
    """Apply top-k and top-p using only the `longest` largest logits."""
    best = _find_largest(logits_BQV, longest)
    top_k = top_k_B.long()[:, None, None].expand(*best.shape[:-1], 1)
    last = best.gather(-1, top_k.clamp(max=longest) - 1)
    floor = torch.where(top_k <= longest, last, NEG_INF)
    if top_p_B is not None:
        kept_mass = logits_BQV.masked_fill(logits_BQV < floor, NEG_INF).logsumexp(-1, keepdim=True)
        reached = (best - kept_mass).exp().cumsum(-1)
        top_p = top_p_B[:, None, None]
        enough = (reached < top_p).sum(-1, keepdim=True).clamp(max=longest - 1)
        floor = torch.maximum(floor, torch.where(top_p < 1, best.gather(-1, enough), NEG_INF))
    return logits_BQV.masked_fill(logits_BQV < floor, NEG_INF)


def _find_largest(logits_BQV: torch.Tensor, number: int) -> torch.Tensor:
    """Return the largest logits, sorted.

    A top-k over whole vocabularies is slow, and they lie in the blocks with the largest maxima.
    """
    vocab = logits_BQV.shape[-1]
    if vocab % _LIST_BLOCK or vocab < 4 * number * _LIST_BLOCK:
        return logits_BQV.topk(number, dim=-1).values
    blocks = logits_BQV.unflatten(-1, (-1, _LIST_BLOCK))
    chosen = blocks.amax(-1).topk(number, dim=-1).indices
    index = chosen[..., None].expand(*chosen.shape, _LIST_BLOCK)
    return blocks.gather(-2, index).flatten(-2).topk(number, dim=-1).values


def search(
    logits_BQV: torch.Tensor,
    min_p_B: torch.Tensor | None,
    top_k_B: torch.Tensor | None,
    top_p_B: torch.Tensor | None,
) -> torch.Tensor:
    """Apply the filters over the whole vocabulary, for any k and p.

    Sorting a vocabulary is the most expensive operation of an HPU, and it has no ordered sums by index. So blocks are
    sorted, in which three small steps find how many tokens, and how much probability, lie above a threshold. The
    largest threshold that keeps enough is then found bit by bit, without reading the vocabulary again.
    """
    num_rows, num_queries, vocab = logits_BQV.shape
    # Tensors as large as the logits are freed as soon as possible.
    padded_NV = functional.pad(logits_BQV.flatten(0, 1), (0, -vocab % _BLOCK), value=NEG_INF)
    blocks_NGS = padded_NV.unflatten(-1, (-1, _BLOCK)).sort(dim=-1, descending=True).values
    del padded_NV
    peak_N1 = blocks_NGS[..., 0].amax(-1, keepdim=True)
    floor_N1 = torch.full_like(peak_N1, NEG_INF)

    def expand_rows(values_B: torch.Tensor) -> torch.Tensor:
        return values_B[:, None].expand(num_rows, num_queries).reshape(-1, 1)

    if min_p_B is not None:
        floor_N1 = peak_N1 + expand_rows(min_p_B).log()
    if top_k_B is not None:
        tries = _Thresholds(blocks_NGS, None)
        floor_N1 = torch.maximum(floor_N1, tries.largest(expand_rows(top_k_B).float()))
    if top_p_B is not None:
        # A row in which all tokens are masked has a peak of -inf.
        weights_NGS = (blocks_NGS - peak_N1.clamp(min=torch.finfo().min)[..., None]).exp_()
        tries = _Thresholds(blocks_NGS, weights_NGS)
        del weights_NGS
        kept_N1 = tries.weigh(floor_N1)
        floor_N1 = torch.maximum(floor_N1, tries.largest(expand_rows(top_p_B) * kept_N1))
    return logits_BQV.masked_fill(logits_BQV < floor_N1.view(num_rows, num_queries, 1), NEG_INF)


class _Thresholds:
    """Number or total weight of the tokens at or above thresholds on their logits."""

    def __init__(self, blocks_NGS: torch.Tensor, weights_NGS: torch.Tensor | None) -> None:
        self._values_NGS = blocks_NGS
        self._ends_of_parts = blocks_NGS[..., _FAN - 1 :: _FAN].contiguous()
        self._ends_of_runs = blocks_NGS[..., _RUN - 1 :: _RUN].contiguous()
        self._within: torch.Tensor | None = None
        if weights_NGS is not None:
            # Summed in two levels to limit rounding errors.
            within = weights_NGS.unflatten(-1, (-1, _RUN)).cumsum(-1)
            self._within = within.flatten(-2)
            self._before = functional.pad(within[..., :-1, -1].cumsum(-1), (1, 0))
        self._offsets = torch.arange(_FAN, device=blocks_NGS.device)

    def weigh(self, threshold_NM: torch.Tensor) -> torch.Tensor:
        """Return the number or weight of tokens at or above each threshold, float32 [N, M]."""
        count_NGM = self._count(threshold_NM)
        if self._within is None:
            return count_NGM.sum(1).float()
        last = (count_NGM - 1).clamp(min=0)
        weight_NGM = self._within.gather(-1, last) + self._before.gather(-1, last // _RUN)
        return (weight_NGM * (count_NGM > 0)).sum(1)

    def _count(self, threshold_NM: torch.Tensor) -> torch.Tensor:
        """Return the number of tokens at or above each threshold by block, int64 [N, G, M].

        Of eight sorted ends those at or above the threshold are counted, then of the part after them.
        """
        threshold = threshold_NM[:, None, :, None]
        full = (self._ends_of_runs[:, :, None] >= threshold).sum(-1)
        for finer in (self._ends_of_parts, self._values_NGS):
            start_NGM = full.clamp(max=finer.shape[-1] // _FAN - 1) * _FAN
            index = start_NGM[..., None] + self._offsets
            values = finer.gather(-1, index.flatten(-2)).view(index.shape)
            full = start_NGM + (values >= threshold).sum(-1)
        return full

    def largest(self, target_N1: torch.Tensor) -> torch.Tensor:
        """Return the largest float32 at or above which there is at least `target`; -inf if there is none.

        First the power of two below it is found, then its fraction, two bits at a time. All thresholds are computed
        exactly. They are not made from bits, since in lazy mode a Gaudi's `view(dtype)` converts numbers.
        """
        target_N1 = target_N1.clamp(min=torch.finfo().tiny)
        borders_L = _list_powers(target_N1.device)
        last = borders_L.shape[0] - 1
        index_N1 = torch.zeros_like(target_N1, dtype=torch.int32)
        steps_M = torch.arange(1, _TRIED + 1, dtype=torch.int32, device=target_N1.device)
        for step in (256, 64, 16, 4, 1):
            tried_NM = (index_N1 + steps_M * step).clamp(max=last)
            thresholds_NM = borders_L.index_select(0, tried_NM.flatten()).view(tried_NM.shape)
            index_N1 = index_N1 + self._count_reached(thresholds_NM, target_N1).int() * step
        index_N1 = index_N1.clamp(max=last)
        floor_N1 = borders_L.index_select(0, index_N1.flatten()).view(index_N1.shape)
        above_N1 = borders_L.index_select(0, (index_N1 + 1).clamp(max=last).flatten()).view(index_N1.shape)
        width_N1 = above_N1 - floor_N1
        width_N1 = torch.where(width_N1 > 2.0**126, 2.0**127, width_N1)  # at both ends of the list
        steps_M = steps_M.float()
        for _ in range(_FRACTION_BITS // 2):
            width_N1 = width_N1 * 0.25
            reached_N1 = self._count_reached(floor_N1 + steps_M * width_N1, target_N1)
            floor_N1 = floor_N1 + reached_N1.float() * width_N1
        width_N1 = width_N1 * 0.5
        reached_N1 = self._count_reached(floor_N1 + width_N1, target_N1)
        return floor_N1 + reached_N1.float() * width_N1

    def _count_reached(self, thresholds_NM: torch.Tensor, target_N1: torch.Tensor) -> torch.Tensor:
        """Return how many of the ascending thresholds have at least `target` at or above them, int64 [N, 1]."""
        return (self.weigh(thresholds_NM) >= target_N1).sum(-1, keepdim=True)


def _list_powers(device: torch.device) -> torch.Tensor:
    """Return float32 in ascending order: -inf, the lowest number, negated powers of two, 0, powers of two, and inf.

    There are no float32 between two of them but fractions of `_FRACTION_BITS` bits.
    """

    def multiply(first: float, factor: float) -> torch.Tensor:
        factors = torch.full((_NUM_POWERS,), factor, device=device)
        is_first = torch.arange(_NUM_POWERS, dtype=torch.int32, device=device) == 0
        return torch.where(is_first, first, factors).cumprod(0)

    def one(value: float) -> torch.Tensor:
        return torch.full((1,), value, device=device)

    falling, rising = multiply(-(2.0**127), 0.5), multiply(2.0**-126, 2.0)
    return torch.cat((one(NEG_INF), one(torch.finfo().min), falling, one(0.0), rising, one(torch.inf)))

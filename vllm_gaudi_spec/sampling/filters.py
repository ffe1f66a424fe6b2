"""Top-k, top-p and min-p filters, which select the tokens that may be sampled at a position.

Each filter corresponds to a threshold on the logits at a position, and so does the combination of all filters. The
min-p threshold follows from the probability of the most likely token, and the top-k threshold is the k-th largest
logit. The top-p threshold is the logit at which the cumulative probability of the tokens kept by the other two filters
reaches p. Tokens with equal logits are either all kept or all removed, and the most likely tokens are always kept.

Exactness: the same tokens are kept as with a float64 sort, unless a cumulative probability is within `ROUNDING` of p.
In that case, the next token may or may not be kept, but this never depends on other rows.

Dimensions: N positions; V vocabulary size; G blocks of S segments of T tokens; E segments in all blocks; M pivots;
C tokens between two pivots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

NEG_INF = float("-inf")
ROUNDING = 4e-6
"""Relative error of a float32 sum over the vocabulary."""

_SEGMENT, _BLOCK = 32, 1024
"""Segment and block sizes, in tokens."""
_NUM_PIVOTS = 16
_LIST_BLOCK = 128
"""Size of the blocks, in tokens, in which the largest logits are found. Common vocabulary sizes are multiples of it."""


def filter_logits(
    logits_BQV: torch.Tensor,
    min_p_B: torch.Tensor | None,
    top_k_B: torch.Tensor | None,
    top_p_B: torch.Tensor | None,
    longest: int = 0,
    num_sampling_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mask the tokens that the filters remove.

    A filter is None if no row uses it. In a row that does not use a filter, min-p is 0, k is V, or p is inf.

    Args:
        longest: Maximum k of the rows with k < V, in which case rows with k = V do not use top-p. 0 if any k may occur.
        num_sampling_B: Number of sampled positions in each row. Logits at other positions may be undefined.
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
    """Mask tokens whose probability is less than `min_p` times that of the most likely token. 0 disables the filter."""
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
    """Return the `number` largest logits in sorted order.

    Only the blocks with the largest maxima are searched, because top-k over a whole vocabulary is slow.
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
    """Apply filters over the whole vocabulary, for any k and p."""
    if min_p_B is not None:
        logits_BQV = apply_min_p(logits_BQV, min_p_B)
    num_rows, num_queries, _ = logits_BQV.shape

    def expand_rows(values_B: torch.Tensor) -> torch.Tensor:
        return values_B[:, None].expand(num_rows, num_queries).reshape(-1, 1)

    blocks = _SortedBlocks(logits_BQV.flatten(0, 1))
    floor_N1 = None if top_k_B is None else blocks.find_kth_largest(expand_rows(top_k_B).float())
    if top_p_B is not None:
        floor_N1 = blocks.find_top_p(expand_rows(top_p_B), floor_N1)
    assert floor_N1 is not None
    return logits_BQV.masked_fill(logits_BQV < floor_N1.view(num_rows, num_queries, 1), NEG_INF)


class _SortedBlocks:
    """Sorted blocks, used to find the largest threshold that keeps enough tokens or enough probability.

    Sorting a whole vocabulary is very expensive on an HPU, and each operator in a search adds latency. Instead, each
    block is sorted separately. The last tokens of all segments are also sorted, and evenly spaced tokens among them
    become pivots. For any distribution of logits, the number of segments with tokens between two neighboring pivots is
    bounded. The number or the probability of the tokens at or above each pivot determines the two pivots that enclose
    the threshold. The threshold is then found among the sorted tokens of the segments between these pivots.
    """

    def __init__(self, logits_NV: torch.Tensor) -> None:
        padded_NV = functional.pad(logits_NV, (0, -logits_NV.shape[-1] % _BLOCK), value=NEG_INF)
        blocks_NGL = padded_NV.unflatten(-1, (-1, _BLOCK)).sort(dim=-1, descending=True).values
        del padded_NV
        self._tokens_NGST = blocks_NGL.unflatten(-1, (-1, _SEGMENT))
        num_rows, num_blocks, segments_per_block, _ = self._tokens_NGST.shape
        num_segments = num_blocks * segments_per_block
        ends_NGS = self._tokens_NGST[..., -1].contiguous()
        self._starts_NE, self._ends_NE = self._tokens_NGST[..., 0].flatten(1), ends_NGS.flatten(1)
        distance = -(-num_segments // _NUM_PIVOTS)
        self._pivots_NM = self._ends_NE.sort(dim=-1, descending=True).values[:, distance - 1 :: distance]
        # Fewer than `distance` segments end between two pivots, and at most one more per block begins there.
        self._num_between = min(distance + num_blocks, num_segments)
        # In each block, find the segment that contains the pivot, and the tokens of that segment at or above the pivot.
        num_whole_NGM = (ends_NGS[..., None] >= self._pivots_NM[:, None, None]).sum(2, dtype=torch.int32)
        self._segment_NGM = num_whole_NGM.clamp(max=segments_per_block - 1)
        first = torch.arange(0, num_rows * num_segments, segments_per_block, dtype=torch.int32, device=logits_NV.device)
        self._index = (self._segment_NGM + first.view(num_rows, num_blocks, 1)).flatten()
        divided = self._tokens_NGST.flatten(0, 2).index_select(0, self._index)
        self._divided_NGMT = divided.view(*self._segment_NGM.shape, _SEGMENT)
        self._is_above_NGMT = self._divided_NGMT >= self._pivots_NM[:, None, :, None]

    def find_kth_largest(self, top_k_N1: torch.Tensor) -> torch.Tensor:
        counts_NGM = self._is_above_NGMT.sum(-1, dtype=torch.int32) + self._segment_NGM * _SEGMENT
        counts_NM = counts_NGM.sum(1, dtype=torch.int32).float()
        ranks_C = torch.arange(1, self._num_between * _SEGMENT + 1, dtype=torch.float32, device=top_k_N1.device)
        return self._find(top_k_N1, counts_NM, lambda tokens_NC, above_N1: ranks_C + above_N1)

    def find_top_p(self, top_p_N1: torch.Tensor, floor_N1: torch.Tensor | None) -> torch.Tensor:
        """Return the smallest logit that top-p keeps, considering only tokens at or above the floor."""
        tokens_NGST = self._tokens_NGST
        # If all tokens in a row are masked, the maximum is -inf.
        peak_N1 = self._starts_NE.amax(-1, keepdim=True).clamp(min=torch.finfo().min)
        peak_N111 = peak_N1[..., None, None]
        if floor_N1 is not None:
            tokens_NGST = tokens_NGST.masked_fill(tokens_NGST < floor_N1[..., None, None], NEG_INF)
        sums_NGS = (tokens_NGST - peak_N111).exp().sum(-1)
        before_NGS = sums_NGS.cumsum(-1) - sums_NGS
        # Sums at pivots below the floor may include tokens below the floor. Such sums reach the target in any case.
        partial_NGM = ((self._divided_NGMT - peak_N111).exp() * self._is_above_NGMT).sum(-1)
        whole_NGM = before_NGS.flatten().index_select(0, self._index).view(partial_NGM.shape)
        target_N1 = top_p_N1 * sums_NGS.sum((1, 2))[:, None]

        def accumulate(tokens_NC: torch.Tensor, above_N1: torch.Tensor) -> torch.Tensor:
            # Sum in two levels to limit rounding errors.
            within_NET = (tokens_NC - peak_N1).exp().unflatten(-1, (-1, _SEGMENT)).cumsum(-1)
            sums_NE = within_NET[..., -1]
            before_NE = sums_NE.cumsum(-1) - sums_NE + above_N1
            return (within_NET + before_NE[..., None]).flatten(1)

        found_N1 = self._find(target_N1, (whole_NGM + partial_NGM).sum(1), accumulate)
        return found_N1 if floor_N1 is None else torch.maximum(found_N1, floor_N1)

    def _find(
        self,
        target_N1: torch.Tensor,
        reached_NM: torch.Tensor,
        accumulate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return the largest logit at which the count or probability reaches `target`, or -inf if there is none.

        Args:
            reached_NM: Count or probability of the tokens at or above each pivot.
            accumulate: Function that returns the count or probability at or above each sorted token between two pivots,
                given these tokens and the count or probability above them.
        """
        is_short_NM = reached_NM < target_N1
        lower_N1 = self._pivots_NM.masked_fill(is_short_NM, NEG_INF).amax(-1, keepdim=True)
        upper_N1 = torch.where(is_short_NM, self._pivots_NM, torch.inf).amin(-1, keepdim=True)
        above_N1 = (reached_NM * is_short_NM).amax(-1, keepdim=True)
        is_between_NE = (self._starts_NE > lower_N1) & (self._ends_NE < upper_N1)
        segments = is_between_NE.float().topk(self._num_between, dim=-1).indices
        index = segments[..., None].expand(*segments.shape, _SEGMENT)
        tokens_NC = self._tokens_NGST.flatten(1, 2).gather(1, index).flatten(1)
        # `above_N1` already includes the tokens at or above the upper pivot.
        tokens_NC = tokens_NC.masked_fill(tokens_NC >= upper_N1, NEG_INF).sort(dim=-1, descending=True).values
        is_reached_NC = accumulate(tokens_NC, above_N1) >= target_N1
        return torch.maximum(torch.where(is_reached_NC, tokens_NC, NEG_INF).amax(-1, keepdim=True), lower_N1)

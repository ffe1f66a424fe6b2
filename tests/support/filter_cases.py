"""Rows for the sampling filters, and what a float64 sort keeps of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_gaudi_spec.sampling.filters import ROUNDING

Filter = Callable[..., torch.Tensor]
OFF = torch.inf


class Filters(NamedTuple):
    """Filter parameters of N rows."""

    min_p_N: torch.Tensor
    top_k_N: torch.Tensor
    top_p_N: torch.Tensor

    def to(self, device: torch.device) -> Filters:
        return Filters(*(values.to(device) for values in self))


def _flat(rows: int, vocab: int, random: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=random) * 0.01


def _steep(rows: int, vocab: int, random: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=random) * 30


def _peaked(rows: int, vocab: int, random: torch.Generator) -> torch.Tensor:
    """Return logits like a language model's: a few likely tokens above a long tail."""
    logits = torch.randn(rows, vocab, generator=random) * 2.5
    best = torch.randint(vocab, (rows, 20), generator=random)
    return logits.scatter_add_(1, best, torch.rand(rows, 20, generator=random) * 15)


def _half_precision(rows: int, vocab: int, random: torch.Generator) -> torch.Tensor:
    """Return logits of which many are equal, also at thresholds."""
    return (torch.randn(rows, vocab, generator=random) * 4).bfloat16().float() / 0.7


def _few_values(rows: int, vocab: int, random: torch.Generator) -> torch.Tensor:
    return torch.randint(-3, 4, (rows, vocab), generator=random).float()


def _equal(rows: int, vocab: int, random: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, 1, generator=random).expand(rows, vocab).clone()


def _one_hot(rows: int, vocab: int, random: torch.Generator) -> torch.Tensor:
    logits = torch.full((rows, vocab), -1e4)
    return logits.scatter_(1, torch.randint(vocab, (rows, 1), generator=random), 1e4)


def _masked(rows: int, vocab: int, random: torch.Generator) -> torch.Tensor:
    """Mask all but about 5 % of the tokens, and in every fourth row all but one."""
    logits = torch.randn(rows, vocab, generator=random) * 3
    forbidden = torch.rand(rows, vocab, generator=random) < 0.95
    forbidden[::4] = True
    forbidden[:, 0] = False
    return logits.masked_fill(forbidden, -torch.inf)


def _neighbors(rows: int, vocab: int, random: torch.Generator) -> torch.Tensor:
    """Return logits around zero that differ only in their last bits, and zeros of both signs."""
    bits = torch.randint(-40, 40, (rows, vocab), generator=random, dtype=torch.int32)
    return torch.where(bits < 0, bits.neg() | torch.tensor(-(1 << 31), dtype=torch.int32), bits).view(torch.float32)


def _close(rows: int, vocab: int, random: torch.Generator) -> torch.Tensor:
    """Return logits that differ only in their last bits, far from zero."""
    bits = torch.randint(-4000, 4000, (rows, vocab), generator=random, dtype=torch.int32)
    return (torch.full((rows, vocab), 11.5).view(torch.int32) + bits).view(torch.float32)


def _geometric(rows: int, vocab: int, random: torch.Generator) -> torch.Tensor:
    """Return logits with partial sums of probabilities close to many values of p, sorted and unsorted."""
    logits = -torch.arange(vocab, dtype=torch.float32).expand(rows, vocab) * 2.0**0.5 / 2
    return logits.clone() if vocab % 2 else logits[:, torch.randperm(vocab, generator=random)]


def _largest(rows: int, vocab: int, random: torch.Generator) -> torch.Tensor:
    return (torch.rand(rows, vocab, generator=random) * 2 - 1) * 3e38


ROWS = (
    _flat,
    _steep,
    _peaked,
    _half_precision,
    _few_values,
    _equal,
    _one_hot,
    _masked,
    _neighbors,
    _close,
    _geometric,
    _largest,
)


def random_filters(rows: int, vocab: int, random: torch.Generator) -> Filters:
    """Set each filter in about half of the rows, with extreme values among them."""
    few = torch.tensor([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 0.999999, OFF])
    top_p = few[torch.randint(len(few), (rows,), generator=random)]
    top_p = torch.where(torch.rand(rows, generator=random) < 0.3, torch.rand(rows, generator=random), top_p)
    numbers = torch.tensor([1, 2, 50, 1000, vocab - 1, vocab, vocab, vocab]).clamp(1, vocab)
    top_k = numbers[torch.randint(len(numbers), (rows,), generator=random)]
    ratios = torch.tensor([0.0, 0.0, 0.0, 0.05, 0.3, 1.0])
    min_p = ratios[torch.randint(len(ratios), (rows,), generator=random)]
    return Filters(min_p, top_k.int(), top_p.clamp(min=1e-6))


def check_kept(logits_NV: torch.Tensor, filters: Filters, filtered_NV: torch.Tensor) -> int:
    """Check that the filters kept what a sort keeps.

    Return the number of rows left open, whose sums are within rounding of p.
    """
    kept_NV = filtered_NV > -torch.inf
    assert torch.equal(filtered_NV, torch.where(kept_NV, logits_NV, -torch.inf)), "what is kept is unchanged"
    ordered, order = logits_NV.sort(dim=-1, descending=True)
    likely = ordered.double()
    # Where tokens like the n-th end: all of them are kept, or none.
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:, :-1] = ordered[:, :-1] > ordered[:, 1:]
    positions = torch.arange(likely.shape[1])
    group_end = torch.where(is_last, positions, likely.shape[1] - 1).flip(-1).cummin(-1).values.flip(-1)
    floor = ordered[:, :1] + filters.min_p_N.log()[:, None]
    kth = ordered.gather(1, group_end.gather(1, filters.top_k_N.long()[:, None] - 1))
    is_left = ordered >= torch.maximum(floor, kth)
    weights = torch.where(is_left, (likely - likely[:, :1]).exp(), 0.0)
    reached = weights.cumsum(-1) / weights.sum(-1, keepdim=True)
    reached = reached.gather(1, group_end)  # of all that are like a token, too

    def number_kept(top_p: torch.Tensor) -> torch.Tensor:
        by_mass = (reached < top_p[:, None]).sum(-1).clamp(max=likely.shape[1] - 1)
        by_mass = group_end.gather(1, by_mass[:, None])[:, 0] + 1
        return torch.where(top_p < 1, torch.minimum(by_mass, is_left.sum(-1)), is_left.sum(-1))

    is_possible = likely > -torch.inf
    found = kept_NV.sum(-1)
    in_order = kept_NV.gather(1, order)
    assert bool((in_order == ((positions < found[:, None]) & is_possible)).all()), "the likeliest are kept"
    top_p = torch.where(filters.top_p_N < 1, filters.top_p_N, 1.0).double()
    low, high = (number_kept(torch.where(filters.top_p_N < 1, top_p + by, 1.0)) for by in (-ROUNDING, ROUNDING))
    high = torch.where(top_p + ROUNDING < 1, high, torch.where(filters.top_p_N < 1, is_left.sum(-1), high))
    most = is_possible.sum(-1)
    low, high = torch.minimum(low, most), torch.minimum(high, most)
    wrong = ((found < low) | (found > high)).nonzero().flatten().tolist()
    assert not wrong, [(row, int(found[row]), int(low[row]), int(high[row])) for row in wrong[:5]]
    return int((low != high).sum())


def check_rows(keep: Filter, rows_each: int, vocab: int, seed: int, device: torch.device) -> tuple[int, int]:
    """Check rows of every kind with random filters. Return the numbers of rows in total and of rows left open."""
    random = torch.Generator().manual_seed(seed)
    num_open = 0
    for kind in ROWS:
        logits_NV = kind(rows_each, vocab, random)
        filters = random_filters(rows_each, vocab, random)
        filtered = keep(logits_NV[:, None].to(device), *filters.to(device))
        num_open += check_kept(logits_NV, filters, filtered.squeeze(1).cpu())
    return rows_each * len(ROWS), num_open

"""Rows for the sampling filters, and what a float64 sort keeps of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def make_rows(rows: int, vocab: int, random: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield logits [rows, vocab] of every kind."""

    def normal() -> torch.Tensor:
        return torch.randn(rows, vocab, generator=random)

    yield normal() * 0.01
    yield normal() * 30
    # Like a language model's: a few likely tokens above a long tail.
    best = torch.randint(vocab, (rows, 20), generator=random)
    yield (normal() * 2.5).scatter_add_(1, best, torch.rand(rows, 20, generator=random) * 15)
    # Many are equal, also at thresholds.
    yield (normal() * 4).bfloat16().float() / 0.7
    yield torch.randint(-3, 4, (rows, vocab), generator=random).float()
    yield torch.randn(rows, 1, generator=random).expand(rows, vocab).clone()
    one_hot = torch.full((rows, vocab), -1e4)
    yield one_hot.scatter_(1, torch.randint(vocab, (rows, 1), generator=random), 1e4)
    # All but about 5 % of the tokens are masked, and in every fourth row all but one.
    forbidden = torch.rand(rows, vocab, generator=random) < 0.95
    forbidden[::4] = True
    forbidden[:, 0] = False
    yield (normal() * 3).masked_fill(forbidden, -torch.inf)
    # Around zero they differ only in their last bits, and zeros have both signs.
    bits = torch.randint(-40, 40, (rows, vocab), generator=random, dtype=torch.int32)
    yield torch.where(bits < 0, bits.neg() | torch.tensor(-(1 << 31), dtype=torch.int32), bits).view(torch.float32)
    # Far from zero they differ only in their last bits.
    bits = torch.randint(-4000, 4000, (rows, vocab), generator=random, dtype=torch.int32)
    yield (torch.full((rows, vocab), 11.5).view(torch.int32) + bits).view(torch.float32)
    # Partial sums of probabilities are close to many values of p, sorted and unsorted.
    geometric = -torch.arange(vocab, dtype=torch.float32).expand(rows, vocab) * 2.0**0.5 / 2
    yield geometric.clone() if vocab % 2 else geometric[:, torch.randperm(vocab, generator=random)]
    yield (torch.rand(rows, vocab, generator=random) * 2 - 1) * 3e38


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
    num_rows = num_open = 0
    for logits_NV in make_rows(rows_each, vocab, random):
        filters = random_filters(rows_each, vocab, random)
        num_rows += rows_each
        filtered = keep(logits_NV[:, None].to(device), *filters.to(device))
        num_open += check_kept(logits_NV, filters, filtered.squeeze(1).cpu())
    return num_rows, num_open

"""Comparable speeds: for each batch of prompts all engines answer within one short window.

On a machine with other work, speeds measured minutes apart differ by more than the speedup of drafting. A turn is one
pass over all prompts; in it each engine answers a batch while the others wait, in alternating order.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import TypeVar

T = TypeVar("T")
Seconds = list[list[float]]
"""Of one engine: by turn, and in it by batch of prompts."""

# Of what is free when one engine is loaded, so much is for the others: one with a drafter takes more than the first.
_SHARE_OF_FREE_MEMORY = 0.7


def batches(num_prompts: int, batch_size: int) -> list[range]:
    return [range(first, min(first + batch_size, num_prompts)) for first in range(0, num_prompts, batch_size)]


def in_order(engines: Sequence[T], window: int) -> list[T]:
    """Forwards and backwards by turns: none is always the first, nor always next to the same."""
    return list(engines) if window % 2 == 0 else list(reversed(engines))


def typical_seconds(seconds: Seconds) -> float:
    """For all prompts, each batch as long as in its median turn."""
    return sum(map(median, zip(*seconds, strict=True)))


def speedup(base: Seconds, seconds: Seconds) -> dict[str, float]:
    """Over the baseline: median and quartiles of the quotients of the same batch in the same turn."""
    quotients = [other / one for turns in zip(base, seconds, strict=True) for other, one in zip(*turns, strict=True)]
    if len(quotients) == 1:
        quotients *= 2  # what quantiles need at least
    low, middle, high = quantiles(quotients, n=4, method="inclusive")
    return {"ratio": middle, "low": low, "high": high}


def why_not_together(num_engines: int, first: int, free: int) -> str | None:
    """`first`: what the first engine takes, which is loaded already; the others take about as much each."""
    needed = (num_engines - 1) * first
    if needed <= _SHARE_OF_FREE_MEMORY * free:
        return None
    return f"the other engines need about {_gib(needed)} GiB, and {_gib(free)} GiB are free"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"

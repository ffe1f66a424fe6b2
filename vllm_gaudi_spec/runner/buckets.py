"""Buckets: the sizes to which batches are padded. `shapes.py` chooses a bucket for each batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from vllm_gaudi_spec.config import UnsupportedConfigError

# Maximum ratio of a bucket to the required size. A list shared by several servers stays below it; a typo exceeds it.
_MAX_RATIO, _SMALL = 64, 256


def refuse_waste(name: str, buckets: tuple[int, ...], needed: int, option: str) -> None:
    if buckets[-1] > _MAX_RATIO * max(needed, _SMALL):
        raise UnsupportedConfigError(
            f"additional_config.gaudi_spec.{name} goes up to {buckets[-1]}, but {option} needs only {needed}; leave "
            "out the larger ones, because memory is allocated for the largest."
        )


def geometric(smallest: int, largest: int, growth: float) -> tuple[int, ...]:
    """Return multiples of `smallest`, each at most about `growth` times the previous one, up to at least `largest`."""
    buckets = [smallest]
    while buckets[-1] < largest:
        buckets.append(max(buckets[-1] + smallest, _round_down(int(buckets[-1] * growth), smallest)))
    buckets[-1] = round_up(largest, smallest)
    return tuple(buckets)


def divided_powers(smallest: int, largest: int, step: int, parts: int) -> tuple[int, ...]:
    """Return powers of two that start at `smallest`, and sizes that divide the intervals between them.

    Each interval is divided into at most `parts` equal steps, each of which is at least `step`. If `step` is 0, the
    result contains only powers of two. The last size is `largest` rounded up to a multiple of `smallest`.
    """
    lengths = [smallest]
    while lengths[-1] < largest:
        power = 1 << lengths[-1].bit_length() - 1
        lengths.append(lengths[-1] + (min(power, max(step, power // parts)) if step else power))
    lengths[-1] = round_up(largest, smallest)
    return tuple(lengths)


def expected_padding(lengths: Sequence[int]) -> float:
    """Return the expected fraction of padding tokens if prompt chunk lengths are uniformly distributed."""
    computed = sum(length * (length - shorter) for shorter, length in pairwise((0, *lengths)))
    return 1 - sum(range(lengths[-1] + 1)) / computed


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _round_down(value: int, multiple: int) -> int:
    return value // multiple * multiple

"""Lists of sizes that steps are padded to: by strategy, or as the user lists them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gaudi_spec.config import LINEAR, Options, UnsupportedConfigError, bucket_list, read_named_file

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend

_LISTS = ("batch", "prefill", "blocks")
_MOST_LINEAR = 16
"""Sizes of a linear list: its step follows from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """What the user listed, and how the rest is made."""

    batch: tuple[int, ...] | None = None
    """Decode batch sizes."""
    prefill: tuple[int, ...] | None = None
    """Prompt chunk lengths."""
    blocks: tuple[int, ...] | None = None
    """Blocks of KV in all rows of a decode."""
    coarse: bool = False
    """Each size costs a program: grow by powers of two."""
    linear: bool = False

    @classmethod
    def choose(cls, options: Options, backend: DeviceBackend) -> Buckets:
        listed = _read(Path(options.buckets_file)) if options.buckets_file else {}
        own = {"batch": options.batch_buckets, "prefill": options.prefill_buckets, "blocks": options.block_buckets}
        listed |= {name: sizes for name, sizes in own.items() if sizes is not None}
        return cls(
            batch=listed.get("batch"),
            prefill=listed.get("prefill"),
            blocks=listed.get("blocks"),
            coarse=backend.captures,
            linear=options.bucket_strategy == LINEAR,
        )

    def growing(self, smallest: int, largest: int, growth: float) -> tuple[int, ...]:
        return _linear(smallest, largest) if self.linear else geometric(smallest, largest, growth)

    def batch_sizes(self, largest: int) -> tuple[int, ...]:
        """1, 2, 3, 4, 6, 8, 12, 16, ...: at most a third of a step is padding. Powers of two where sizes are dear."""
        if self.linear:
            return _linear(1, largest)
        steps = (2,) if self.coarse else (2, 3)
        sizes: Iterable[int] = (step << exponent for exponent in range(largest.bit_length()) for step in steps)
        return tuple(sorted({1, largest, *(size for size in sizes if size <= largest)}))


def _read(path: Path) -> dict[str, tuple[int, ...]]:
    """A JSON file with some of the lists by name."""
    where = f"additional_config.gaudi_spec.buckets_file {path}"
    try:
        given = json.loads(read_named_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedConfigError(f"{where} can not be read: {error}.") from error
    if not isinstance(given, dict) or not set(given) <= set(_LISTS):
        raise UnsupportedConfigError(f"{where} must hold lists by name, out of {', '.join(_LISTS)}.")
    return {name: bucket_list(f"buckets_file: {name}", sizes) for name, sizes in given.items()}


def _linear(smallest: int, largest: int) -> tuple[int, ...]:
    step = round_up(-(-largest // _MOST_LINEAR), smallest)
    return tuple(sorted({smallest, *range(step, largest, step), round_up(largest, smallest)}))


def geometric(smallest: int, largest: int, growth: float) -> tuple[int, ...]:
    """Multiples of `smallest` that grow by at most about `growth`, up to one that covers `largest`."""
    buckets = [smallest]
    while buckets[-1] < largest:
        buckets.append(max(buckets[-1] + smallest, _round_down(int(buckets[-1] * growth), smallest)))
    buckets[-1] = round_up(largest, smallest)
    return tuple(buckets)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _round_down(value: int, multiple: int) -> int:
    return value // multiple * multiple

"""A bar on a terminal, a line now and then where nobody sees it move."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
_SECONDS_BETWEEN_LINES = 10.0


def progress(items: Iterable[T], title: str, total: int, done: int = 0) -> Iterator[T]:
    """Hands on the items, and counts them on stderr; `done` were there before."""
    if sys.stderr.isatty():
        yield from tqdm(items, desc=title, total=total, initial=done)
        return
    started = last = time.monotonic()
    for item in items:
        yield item
        done += 1
        now = time.monotonic()
        if done == total or now - last >= _SECONDS_BETWEEN_LINES:
            print(f"{title}: {done} of {total}, {now - started:.0f} s", file=sys.stderr, flush=True)
            last = now

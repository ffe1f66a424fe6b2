"""Limits the KV cache's memory when the host is the device."""

from __future__ import annotations

import psutil

_MOST = 4 << 30


def free() -> int:
    return int(psutil.virtual_memory().available)


def choose_kv_bytes(utilization: float, less: int = 0) -> int:
    """Return the size of the KV cache. `less` is the memory that will be allocated before the cache."""
    # Unlike a card's memory, host memory has other users, and zeroing it takes time at every start.
    return min(int((free() - less) * utilization / 2), _MOST)

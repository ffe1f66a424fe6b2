"""Determines the size of the KV cache when the device is the host itself."""

from __future__ import annotations

import psutil

_MOST = 4 << 30


def free() -> int:
    return int(psutil.virtual_memory().available)


def choose_kv_bytes(utilization: float, less: int = 0) -> int:
    """Return the size of the KV cache. `less` is the memory that will be allocated before the cache."""
    # Leave memory unused, because the host has other processes and zeroing memory takes time at every start.
    return min(int((free() - less) * utilization / 2), _MOST)

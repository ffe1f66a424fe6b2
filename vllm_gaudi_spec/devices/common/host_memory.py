"""Determines the KV cache size on devices that use the host's memory."""

from __future__ import annotations

import psutil

_MOST = 4 << 30


def free() -> int:
    return int(psutil.virtual_memory().available)


def choose_kv_bytes(utilization: float, less: int = 0) -> int:
    """Return the size of the KV cache in bytes. `less` is the number of bytes to be allocated before the cache."""
    # Do not use all memory, because other processes need some and because zeroing the cache takes time at every start.
    return min(int((free() - less) * utilization / 2), _MOST)

"""How much memory the KV cache may take if the host is the device."""

from __future__ import annotations

import psutil

_MOST = 4 << 30


def free() -> int:
    return int(psutil.virtual_memory().available)


def choose_kv_bytes(utilization: float, less: int = 0) -> int:
    """Return the size of the KV cache. `less` is memory that will be taken before the cache is allocated."""
    # Unlike a card's memory, the host's has other users, and zeroing it takes time at every start.
    return min(int((free() - less) * utilization / 2), _MOST)

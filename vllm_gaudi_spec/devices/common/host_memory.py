"""How much of a host's memory the KV cache takes, where the host is the device."""

from __future__ import annotations

import psutil

_MOST = 4 << 30


def free() -> int:
    return int(psutil.virtual_memory().available)


def of_children() -> int:
    """What the processes that this one started have for themselves alone."""
    return sum(child.memory_full_info().uss for child in psutil.Process().children(recursive=True))


def for_kv(utilization: float, less: int = 0) -> int:
    """`less`: what will not be free any more when the cache is made."""
    # Unlike a card's memory this one has other users, and clearing it takes time at every start.
    return min(int((free() - less) * utilization / 2), _MOST)

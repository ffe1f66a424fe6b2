"""How much of a host's memory the KV cache takes, where the host is the device."""

from __future__ import annotations

import psutil

_MOST = 4 << 30


def for_kv(utilization: float) -> int:
    # Unlike a card's memory this one has other users, and clearing it takes time at every start.
    return min(int(psutil.virtual_memory().available * utilization / 2), _MOST)

"""Recognizes CANN errors. The doctor also uses this module on machines without torch."""

from __future__ import annotations

_NO_ROOM_FOR_GRAPHS = (
    "207008",
    "stream resources are insufficient",
    "insufficient_stream_resources",
    "alloc sq cq fail",
    "resource alloc fail stream wait event failed",
)
"""Parts of lowercase error messages that CANN and the drivers report if a card has no streams, queues, or events left
for another graph."""


def has_no_room(message: str) -> bool:
    return any(mark in message.lower() for mark in _NO_ROOM_FOR_GRAPHS)

"""Recognizes errors of CANN. The doctor, which explains them, imports this without torch."""

from __future__ import annotations

_NO_ROOM_FOR_GRAPHS = (
    "207008",
    "stream resources are insufficient",
    "insufficient_stream_resources",
    "alloc sq cq fail",
    "resource alloc fail stream wait event failed",
)
"""How CANN and drivers report that graphs hold all streams, queues or events of a card, in lower case."""


def has_no_room(message: str) -> bool:
    return any(mark in message.lower() for mark in _NO_ROOM_FOR_GRAPHS)

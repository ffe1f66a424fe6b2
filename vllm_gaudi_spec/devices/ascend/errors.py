"""Recognizes CANN errors. This module does not need torch, so the doctor can always use it."""

from __future__ import annotations

_NO_ROOM_FOR_GRAPHS = (
    "207008",
    "stream resources are insufficient",
    "insufficient_stream_resources",
    "alloc sq cq fail",
    "resource alloc fail stream wait event failed",
)
"""Lowercase error messages from CANN and the drivers when graphs use all of a card's streams, queues, or events."""


def has_no_room(message: str) -> bool:
    return any(mark in message.lower() for mark in _NO_ROOM_FOR_GRAPHS)

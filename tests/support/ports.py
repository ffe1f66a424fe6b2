"""Ports of this machine."""

from __future__ import annotations

import socket

_RESERVED: list[socket.socket] = []


def free_port() -> int:
    """Free for a server for as long as this process lives: a server takes tens of seconds to come to it, and until then
    nobody else gets it. Where nobody listens, connections are refused."""
    reserved = socket.socket()
    # With this set on both sides, and nobody listening on this one, a server may bind the same port.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    _RESERVED.append(reserved)
    return reserved.getsockname()[1]

"""Ports of this machine."""

import socket

_RESERVED: list[socket.socket] = []


def free_port() -> int:
    """Return a port that stays reserved for a server of this process.

    A server takes tens of seconds to bind it. Until then no other process gets it, and connections are refused.
    """
    reserved = socket.socket()
    # With this set on both sides, and nobody listening on this one, a server may bind the same port.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    _RESERVED.append(reserved)
    return reserved.getsockname()[1]

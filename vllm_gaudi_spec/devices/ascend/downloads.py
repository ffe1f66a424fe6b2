"""Waits for device-to-host copies, which torch_npu may silently drop.

torch_npu submits its work to CANN from its own queue. Once an operator has failed, torch_npu drops all queued and later
work, including events, and raises the error only once, in the next call of any kind. Waiting for a dropped event may
return immediately, as if the copy were complete, or may never return (NPUEvent::synchronize in NPUEvent.cpp and
Repository::ReadQueue in NPUQueue.cpp, Ascend/pytorch 9e73e708a).
"""

from __future__ import annotations

import time
from typing import Any

import torch

_MARK = 0xA5
_MARKED_BYTES = 64
"""The number of bytes at the start of a buffer that are set to `_MARK`. Copies are never partial, and no token, count,
flag, or run of 16 numbers consists of these bytes."""
_TIMEOUT_S = 10.0
_POLL_S = 2e-5
"""The polling interval. In practice, Linux sleeps for 60 to 100 microseconds."""

_DROPPED = (
    "torch_npu dropped a copy to the host because an earlier operator failed; its error is further up in the log. "
    "Restart the engine."
)


def mark(host: torch.Tensor) -> torch.Tensor:
    """Mark a host buffer as not yet written. Without a mark, a dropped copy would go unnoticed, because reused pinned
    memory contains the tokens of an earlier step."""
    _first_bytes(host).fill_(_MARK)
    return host


def wait_for(done: Any, host: torch.Tensor, runtime: Any) -> None:
    """Wait for the event `done`, which was recorded after the copy to `host`. Raise RuntimeError if the copy was
    dropped."""
    # Poll, because a blocking wait may never return.
    deadline = time.monotonic() + _TIMEOUT_S
    while not done.query():
        if time.monotonic() > deadline:
            # After this call, the event either has completed or never will.
            runtime.synchronize()
            if not done.query():
                raise RuntimeError(_DROPPED)
        time.sleep(_POLL_S)
    if host.numel() > 0 and bool((_first_bytes(host) == _MARK).all()):
        raise RuntimeError(_DROPPED)


def _first_bytes(host: torch.Tensor) -> torch.Tensor:
    return host.view(-1).view(torch.uint8)[:_MARKED_BYTES]

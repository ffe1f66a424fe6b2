"""Queues for operations outside graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from card_emulator.counters import Counters


class QueueDevice(Protocol):
    lazy: bool
    counters: Counters

    def compiled(self, kind: str, what: str, where: str) -> None: ...


class QueuedTensor(Protocol):
    epoch: int
    index: int
    pending: bool


class Queue:
    """The default queue. It launches each operation as soon as it is issued, using a precompiled kernel."""

    keyed = False
    """Whether `record` needs a key that describes the operation."""

    def __init__(self, device: QueueDevice) -> None:
        self.device = device
        self.epoch = 1

    def enter(self, tensor: Any) -> Any:
        """Return the part of the key for a tensor that is used for the first time since the last flush."""
        raise NotImplementedError

    def record(
        self, key: list[Any], new: Sequence[QueuedTensor], written: Sequence[QueuedTensor], computes: bool
    ) -> None:
        """Record an operation. `key` contains its name, its scalar arguments, and a description of its tensors."""
        self.device.counters.step.launches += computes

    def is_pending(self, tensor: QueuedTensor) -> bool:
        return False

    def flush(self, cause: str) -> bool:
        """Launch the pending operations. Returns whether there were any."""
        return False

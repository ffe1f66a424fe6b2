"""Queues of operations outside graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from card_emulator.counters import Counters


class QueueDevice(Protocol):
    """Interface of a device to its queue."""

    lazy: bool
    counters: Counters

    def compiled(self, kind: str, what: str, where: str) -> None: ...


class QueuedTensor(Protocol):
    """The state that a queue keeps on a tensor."""

    epoch: int
    index: int
    pending: bool


class Queue:
    """The default queue, which launches each operation when it is issued, by a kernel that exists already."""

    keyed = False
    """Whether `record` needs the description of an operation."""

    def __init__(self, device: QueueDevice) -> None:
        self.device = device
        self.epoch = 1

    def enter(self, tensor: Any) -> Any:
        """The part of an operation's key that describes a tensor not seen since the last flush."""
        raise NotImplementedError

    def record(
        self, key: list[Any], new: Sequence[QueuedTensor], written: Sequence[QueuedTensor], computes: bool
    ) -> None:
        """`key` has the operation's name, its scalars, and a description of its tensors."""
        self.device.counters.step.launches += computes

    def is_pending(self, tensor: QueuedTensor) -> bool:
        return False

    def flush(self, cause: str) -> bool:
        """False when nothing was pending."""
        return False

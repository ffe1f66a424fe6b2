"""The queue of operations outside graphs, and the interfaces that it uses."""

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
    """A queue that launches each operation immediately. Subclasses may collect operations before they launch them."""

    keyed = False
    """Whether `record` needs a key that describes the operation."""

    def __init__(self, device: QueueDevice) -> None:
        self.device = device
        self.epoch = 1

    def enter(self, tensor: Any) -> Any:
        """Return the key element for a tensor that is used for the first time since the last flush."""
        raise NotImplementedError

    def record(
        self, key: list[Any], new: Sequence[QueuedTensor], written: Sequence[QueuedTensor], computes: bool
    ) -> None:
        """Record an operation.

        Args:
            key: The operation's name and scalar arguments, and an element for each tensor argument.
            new: The results that have new tensors.
            written: The arguments that are changed in place.
            computes: Whether the operation does work instead of only creating a view.
        """
        self.device.counters.step.launches += computes

    def is_pending(self, tensor: QueuedTensor) -> bool:
        return False

    def flush(self, cause: str) -> bool:
        """Launch the pending operations, and return whether there were any."""
        return False

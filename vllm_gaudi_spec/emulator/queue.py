"""What becomes of operations outside graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_gaudi_spec.emulator.card import Device
    from vllm_gaudi_spec.emulator.tensor import DeviceTensor


class Queue:
    """The plain way: each operation is launched when it is issued, by a kernel that was there before."""

    keyed = False
    """Whether `record` wants to know what an operation is made of."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.epoch = 1

    def enter(self, tensor: Any) -> Any:
        """The part of an operation's key that stands for a tensor not seen since the last flush."""
        raise NotImplementedError

    def record(
        self, key: list[Any], new: Sequence[DeviceTensor], written: Sequence[DeviceTensor], computes: bool
    ) -> None:
        """`key` is the operation's name, its scalars, and what tensors it takes."""
        self.device.counters.step.launches += computes

    def is_pending(self, tensor: DeviceTensor) -> bool:
        return False

    def waited(self) -> None:
        """The host waited for what was issued on the current stream."""

    def flush(self, cause: str) -> bool:
        """False when nothing was pending."""
        return False

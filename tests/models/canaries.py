"""Memory around the raw buffers of the KV cache, filled with a pattern that nothing may change."""

import functools
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

PATTERN = 0xA5
PADDING = 4
"""Bytes on either side of a buffer for each of its own: a kernel that took the cache for one of wider numbers wrote up
to four times its size."""
_LEAST = 1 << 20


class Guarded:
    """One buffer, in the middle of a larger one. Its storage begins and ends where the buffer does."""

    def __init__(self, num_bytes: int) -> None:
        padding = max(PADDING * num_bytes, _LEAST)
        self.whole = np.frombuffer(mmap.mmap(-1, num_bytes + 2 * padding), dtype=np.uint8)
        self.begin, self.end = padding, padding + num_bytes
        self.whole[: self.begin] = PATTERN
        self.whole[self.end :] = PATTERN

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Zero, as an anonymous mapping is."""
        return torch.frombuffer(self.whole[self.begin : self.end], dtype=dtype).view(shape)

    def damage(self) -> str | None:
        before = np.flatnonzero(self.whole[: self.begin] != PATTERN)
        after = np.flatnonzero(self.whole[self.end :] != PATTERN)
        if not len(before) and not len(after):
            return None
        size = self.end - self.begin
        parts = []
        if len(before):
            parts.append(f"{len(before)} bytes before it, from byte {int(before[0]) - self.begin}")
        if len(after):
            parts.append(f"{len(after)} bytes after it, to byte {size + int(after[-1])}")
        return f"written outside of a KV buffer of {size} bytes: {', '.join(parts)}"


class OnCard(Guarded):
    """In a card's memory. Its storage is the whole."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        super().__init__(num_bytes)
        self._there = torch.from_numpy(self.whole).to(device)

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return self._there[self.begin : self.end].view(dtype).view(shape)

    def damage(self) -> str | None:
        self.whole[:] = self._there.cpu().numpy()
        return super().damage()


class Canaries:
    """All buffers that were allocated while `watching` ran a function."""

    def __init__(self) -> None:
        self.buffers: list[Guarded] = []

    def watching(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        """`allocate`, in which each tensor that `torch.zeros` makes has canaries around its values."""
        zeros = torch.zeros

        def guarded_zeros(*size: Any, **options: Any) -> Any:
            made = zeros(*size, **options)
            values = vars(made).get("inner", made)  # of an emulated card's tensor
            if values.nbytes and not values.is_meta:
                on_host = values.device.type == "cpu"
                self.buffers.append(Guarded(values.nbytes) if on_host else OnCard(values.nbytes, values.device))
                values.set_(self.buffers[-1].tensor(values.shape, values.dtype))
            return made

        @functools.wraps(allocate)
        def run(*args: Any, **named: Any) -> Any:
            torch.zeros = guarded_zeros
            try:
                return allocate(*args, **named)
            finally:
                torch.zeros = zeros

        return run

    def damage(self) -> str | None:
        return next(filter(None, (buffer.damage() for buffer in self.buffers)), None)

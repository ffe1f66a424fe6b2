"""The queue for lazy mode, which collects operations in a pending graph and compiles it into a recipe at a marker.

A recipe is identified by a running hash of the graph. Each operation adds its name, its scalar arguments, the layouts
of tensors that are new to the graph, and the IDs of all other tensors. When a graph is new, its first operation that no
known graph has at this point determines which source line to report.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from card_emulator.queue import Queue, QueueDevice, QueuedTensor
from card_emulator.source import Line, caller, describe, here

# The first tensor ID. IDs are larger than the scalar arguments of realistic programs, so that the two are not confused.
_FIRST = 1 << 40


class LazyGraph(Queue):
    keyed = True

    def __init__(self, device: QueueDevice) -> None:
        super().__init__(device)
        self.recipes: set[int] = set()
        self._prefixes: set[int] = set()
        self._clear()

    def _clear(self) -> None:
        self.epoch += 1
        self._hash = 0
        self._next = _FIRST
        self._computes = False
        self._hashes: list[int] = []
        self._lines: list[Line] = []
        self._ops: list[str] = []

    def enter(self, tensor: Any) -> Any:
        """Return the layout of a tensor from outside the graph. Later operations refer to the tensor by its ID."""
        tensor.epoch = self.epoch
        tensor.pending = False
        tensor.index = self._next
        self._next += 1
        inner = tensor.inner
        return inner.dtype, inner.shape, inner.stride(), inner.storage_offset()

    def record(
        self, key: list[Any], new: Sequence[QueuedTensor], written: Sequence[QueuedTensor], computes: bool
    ) -> None:
        number = self._next
        for tensor in (*new, *written) if written else new:
            tensor.epoch = self.epoch
            tensor.pending = True
            tensor.index = number
            number += 1
        self._next = number
        self._hash = hash((self._hash, *key))
        self._hashes.append(self._hash)
        self._lines.append(caller())
        self._ops.append(key[0])
        if computes:
            self._computes = True
        if not self.device.lazy:
            self.flush("eager")

    def is_pending(self, tensor: QueuedTensor) -> bool:
        return tensor.pending and tensor.epoch == self.epoch

    def flush(self, cause: str) -> bool:
        """Launch the pending operations, compiling them first if the graph is new. Return whether there were any."""
        if not self._computes:
            # Views alone need no launch, and they remain valid after the graph is cleared.
            if self._hashes:
                self._clear()
            return False
        key, hashes = self._hash, self._hashes
        self.device.counters.step.launches += 1
        if key in self.recipes:
            self._clear()
            return True
        first = next((i for i, prefix in enumerate(hashes) if prefix not in self._prefixes), None)
        if first is None:
            what, where = f"a graph of {len(hashes)} ops, which is the beginning of a known graph ({cause})", here()
        else:
            what = f"{self._ops[first]}, op {first + 1} of {len(hashes)}, cut by {cause}"
            where = describe(self._lines[first])
        self.recipes.add(key)
        self._prefixes.update(hashes)
        self._clear()
        self.device.compiled("lazy compile", what, where)
        return True

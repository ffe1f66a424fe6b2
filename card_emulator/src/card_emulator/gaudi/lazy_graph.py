"""Lazy mode: operations collect in a pending graph, which a marker turns into a recipe.

Only a running hash of a graph is kept. One operation extends the hash by its kind, its scalar arguments, the geometry
of tensors that enter the graph with it, and the numbers of those computed inside. If a graph is new, the set of known
prefixes tells which operation made it so, and therefore which line to blame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from card_emulator.queue import Queue, QueueDevice, QueuedTensor
from card_emulator.source import Line, caller, describe, here

# Numbers of tensors begin where no scalar argument comes.
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
        """A tensor from outside is part of the recipe by its geometry, once; afterwards by its number."""
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
        """Launch the pending operations, and compile them if no equal graph was seen before. Returns False if nothing
        was pending."""
        if not self._computes:
            # Views alone launch nothing, and stay views of what they were.
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
            what, where = f"a graph of {len(hashes)} ops that ends where another goes on ({cause})", here()
        else:
            what = f"{self._ops[first]}, op {first + 1} of {len(hashes)}, cut by {cause}"
            where = describe(self._lines[first])
        self.recipes.add(key)
        self._prefixes.update(hashes)
        self._clear()
        self.device.compiled("lazy compile", what, where)
        return True

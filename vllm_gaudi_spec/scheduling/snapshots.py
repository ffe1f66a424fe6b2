"""Tracks which prefixes have a snapshot of their recurrent state, and which slot of the workers stores each snapshot.

vLLM's prefix cache finds a prompt's cached KV blocks. Layers with a recurrent state have no KV blocks: all that they
store for a prefix is the state after its last token. If a prompt chunk ends at a block boundary, the workers copy the
state to a slot. A prefix cache hit ends at the last block boundary that has both KV blocks and a snapshot.

A slot is read before the forward passes of a step and written after them, and the device runs steps in the order in
which they are scheduled. A slot may therefore be reused as soon as the step that reads it has been scheduled, and
no slot has to be pinned.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_gaudi_spec.upstream.scheduler import BlockHash, Request


class Snapshots:
    """Assigns snapshot slots to prefixes and reuses the least recently used slot first."""

    def __init__(self, num_slots: int, *, block_size: int, hash_size: int, drops_a_block: bool = False) -> None:
        """Initialize the slots, all of which are empty.

        Args:
            num_slots: Number of slots.
            block_size: Number of tokens in a KV block. Boundaries are multiples of this size.
            hash_size: Number of tokens that a block hash covers.
            drops_a_block: Whether a hit is always one block shorter than the cached prefix, as for heads, whose KV in
                the last block is incomplete.
        """
        self._block_size = block_size
        self._hash_size = hash_size
        self._num_dropped = block_size if drops_a_block else 0
        self._slots: OrderedDict[BlockHash, int] = OrderedDict()
        """Maps the hash of a prefix's last block, which depends on all preceding tokens, to a slot. The first entry is
        reused next."""
        self._free = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._slots)

    def clear(self) -> None:
        self._free += self._slots.values()
        self._slots.clear()

    # --- before a request is scheduled ---

    def longest(self, request: Request, num_tokens: int) -> int:
        """Return the last boundary, at most `num_tokens`, that has a snapshot, or 0 if there is none."""
        first = num_tokens // self._block_size * self._block_size
        boundaries = range(first, 0, -self._block_size)
        return next((boundary for boundary in boundaries if self._key(request, boundary) in self._slots), 0)

    def cut(self, request: Request, start: int, num_new: int) -> int:
        """Return the number of new tokens to compute in this step so that a request's chunk ends at a boundary.

        Chunks end at the last boundary that the same prompt can hit, and at the boundary after which other prompts
        diverged (`shared_prefix_boundary`), which has KV blocks but no snapshot. As a result, the second prompt with a
        common prefix saves a snapshot of the prefix, and the third prompt starts from it.
        """
        num_tokens, end = request.num_tokens, start + num_new
        if start >= num_tokens - 1:
            return num_new
        stops = (self._last_boundary(request), self._round_down(request.shared_prefix_boundary))
        if before := [stop for stop in stops if start < stop < end]:
            return min(before) - start
        if end < num_tokens and (floor := self._round_down(end)) > start:
            return floor - start
        return num_new

    # --- once a request is scheduled ---

    def use(self, request: Request, num_tokens: int) -> int:
        """Return the slot for the first `num_tokens` tokens of a request, and mark it as recently used."""
        key = self._key(request, num_tokens)
        assert key is not None
        self._slots.move_to_end(key)
        return self._slots[key]

    def keep(self, request: Request, start: int, end: int) -> int | None:
        """Return the slot in which to save the state after this step's tokens, or None if no snapshot is needed.

        No snapshot is needed if one already exists, if the end is not a boundary or has no hash yet, or if the step
        computes only the last token, which is decoded and may stay pending.
        """
        if start >= request.num_tokens - 1 or end % self._block_size:
            return None
        key = self._key(request, end)
        if key is None or key in self._slots:
            return None
        self._slots[key] = slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        # Few prompts will start at the end of an arbitrary chunk of a long prompt. Such a snapshot is the first to
        # be replaced. If slots are scarce, all of these snapshots therefore share one slot.
        if end < self._last_boundary(request) and end != self._round_down(request.shared_prefix_boundary):
            self._slots.move_to_end(key, last=False)
        return slot

    def _last_boundary(self, request: Request) -> int:
        """Return the last boundary from which a prompt can start, which leaves at least its last token to compute."""
        num_hashed = len(request.block_hashes) * self._hash_size
        return self._round_down(min(request.num_tokens - 1, num_hashed)) - self._num_dropped

    def _round_down(self, num_tokens: int) -> int:
        return num_tokens // self._block_size * self._block_size

    def _key(self, request: Request, num_tokens: int) -> BlockHash | None:
        """Return the hash of a prefix's last block, or None if the hash also covers tokens that are not known yet.

        Since vLLM 0.33, a block hash also covers the tokens after the block that heads read.
        """
        hashes: Sequence[BlockHash] = request.block_hashes
        last = num_tokens // self._hash_size - 1
        return hashes[last] if last < len(hashes) else None

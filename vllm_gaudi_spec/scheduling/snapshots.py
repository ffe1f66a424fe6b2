"""Which beginnings of prompts have a snapshot of their recurrent state, and in which slot of the workers it is.

vLLM's prefix cache finds the blocks of KV that a prompt begins with. A layer with a recurrent state has none: what it
knows of a prefix is its state after the last token, which the workers copy to a slot where a prompt chunk ends at a
border of blocks. So a hit is as long as the longest border that has blocks of KV and a snapshot.

A slot is read before a step's forwards and written after them, and the device runs steps in the order in which they
are scheduled. So a slot may be given away as soon as the step that reads it is scheduled, and nothing is pinned.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_gaudi_spec.upstream.scheduler import BlockHash, Request


class Snapshots:
    def __init__(self, num_slots: int, *, block_size: int, hash_size: int, drops_a_block: bool = False) -> None:
        """`block_size`: borders are its multiples. `hash_size`: the tokens of a block hash. `drops_a_block`: whether a
        hit is always a block shorter than what is there, as with heads, whose KV of it is not complete."""
        self._block_size = block_size
        self._hash_size = hash_size
        self._num_dropped = block_size if drops_a_block else 0
        self._slots: OrderedDict[BlockHash, int] = OrderedDict()
        """By the hash of the prefix's last block, which depends on all tokens before it. The first is the next to be
        given away."""
        self._free = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._slots)

    def clear(self) -> None:
        self._free += self._slots.values()
        self._slots.clear()

    # --- before a request is scheduled ---

    def longest(self, request: Request, num_tokens: int) -> int:
        """The last border up to `num_tokens` that has a snapshot; 0: none."""
        first = num_tokens // self._block_size * self._block_size
        borders = range(first, 0, -self._block_size)
        return next((border for border in borders if self._key(request, border) in self._slots), 0)

    def cut(self, request: Request, start: int, num_new: int) -> int:
        """How many of its new tokens a request computes in one step: a prompt's chunk ends at a border where it can.

        It ends at the last border that the same prompt will find, and where other prompts went on otherwise
        (`shared_prefix_boundary`): blocks of KV were found up to there, and no snapshot. So the second prompt with a
        common beginning leaves a snapshot of that, and the third one starts from it.
        """
        num_tokens, end = request.num_tokens, start + num_new
        if start >= num_tokens - 1:
            return num_new
        stops = (self._last_border(num_tokens), self._floor(request.shared_prefix_boundary))
        if before := [stop for stop in stops if start < stop < end]:
            return min(before) - start
        if end < num_tokens and (floor := self._floor(end)) > start:
            return floor - start
        return num_new

    # --- once it is scheduled ---

    def use(self, request: Request, num_tokens: int) -> int:
        """The slot of its first tokens."""
        key = self._key(request, num_tokens)
        self._slots.move_to_end(key)
        return self._slots[key]

    def keep(self, request: Request, start: int, end: int) -> int | None:
        """The slot for the state at the end of a step's tokens; None where nothing is to be kept: the state is there
        already, the end is no border, or the last token stands alone, which is decoded and may stay pending."""
        if start >= request.num_tokens - 1 or end % self._block_size:
            return None
        key = self._key(request, end)
        if key in self._slots:
            return None
        self._slots[key] = slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        # Where a chunk of a long prompt happened to end, few will start. It is the next to go, so all such ends have
        # one slot among them where slots are scarce.
        if end < self._last_border(request.num_tokens) and end != self._floor(request.shared_prefix_boundary):
            self._slots.move_to_end(key, last=False)
        return slot

    def _last_border(self, num_tokens: int) -> int:
        """That a prompt of these tokens may start from: at least the last one is computed."""
        return self._floor(num_tokens - 1) - self._num_dropped

    def _floor(self, num_tokens: int) -> int:
        return num_tokens // self._block_size * self._block_size

    def _key(self, request: Request, num_tokens: int) -> BlockHash:
        hashes: Sequence[BlockHash] = request.block_hashes
        return hashes[num_tokens // self._hash_size - 1]

"""Drafter KV sync: the drafter's KV and states follow what the target computes and accepts.

`DraftModelKVSync` and `HeadKVSync` are next to their proposers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_spec.graphs import Job
    from vllm_gaudi_spec.records import Batch, DraftBatch, Drafts, Hidden, Request, SampledRows
    from vllm_gaudi_spec.runner.requests import Requests


class DrafterKVSync:
    """Base class, and the KV sync of drafters without KV or states: all events are no-ops."""

    has_kv = False
    """Whether drafting rounds read KV: the drafter's own, which they also write, or the target's."""
    reads_every_step = False
    """Whether the drafter reads after each verification, even without drafts."""

    # --- host ---

    def on_admitted(self) -> None:
        """Handle the requests in `requests.admitted`."""

    def on_forward(self, batch: Batch) -> None:
        """Handle a batch that the target has computed."""

    def before_round(self, sampled: SampledRows, max_drafts_np: np.ndarray, batch: DraftBatch | None) -> None:
        """Read what a round needs; called after each verification.

        Args:
            max_drafts_np: Largest number of drafts of each request now.
            batch: The rows on the device, for a drafter with KV, if a round follows or `reads_every_step` is set.
        """

    def on_drafted(self, requests: list[Request], max_drafts_np: np.ndarray) -> None:
        """Record on the host that a round ran."""

    def invalidate(self, requests: list[Request]) -> None:
        """Discard what was read of requests, because a read failed or its KV may be wrong."""

    def on_faulty(self, requests: list[Request]) -> None:
        """Handle requests whose drafts were unusable: the KV that was read may be wrong."""

    # --- device: parts of the sampling pass and of a round ---

    def on_verified(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> None:
        """Handle that rows have `lengths_B` tokens now."""

    def limit_drafts(self, rows_B: torch.Tensor, lengths_B: torch.Tensor, max_drafts_B: torch.Tensor) -> torch.Tensor:
        """Return `max_drafts_B`, int32 [B], reduced for rows of which too little was read."""
        return max_drafts_B

    def gather_hidden(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> Hidden | None:
        """Return the hidden states that predict each row's first draft token, for drafters that read them."""
        return None

    def on_round_written(self, rows_B: torch.Tensor, lengths_B: torch.Tensor, drafts: Drafts) -> None:
        """Record on the device that drafts and their KV were written."""

    # --- warm-up ---

    def jobs(self) -> Iterator[Job]:
        """Yield warm-up jobs for reads and state updates, but not for rounds."""
        yield from ()


class ReadBlocks:
    """Tracks which KV blocks a drafter has read.

    vLLM shares blocks between requests by what the target has written in them. The drafter's part of a block may be
    missing, because drafting was off for its request or at that load. Such a block does not count as read.
    """

    def __init__(self, requests: Requests, num_blocks: int, groups: list[int], *, keeps_up: bool = False) -> None:
        """
        Args:
            groups: KV cache groups that hold layers of the drafter.
            keeps_up: Whether the drafter reads all that the target computes, except what `forget` discards.
        """
        self._tables = [requests.tables_np[group] for group in groups]
        self._sizes = [requests.block_sizes[group] for group in groups]
        self._counts = [requests.num_blocks[group] for group in groups]
        self._read_np = np.zeros(num_blocks, dtype=np.int32)
        """Number of tokens at the start of each block that the drafter has read. Block 0 is padding."""
        self._seen = [np.zeros_like(counts) for counts in self._counts]
        """Number of blocks of each row that were initialized, or were computed at admission."""
        self._keeps_up = keeps_up

    def admit(self, row: int, num_computed: int) -> None:
        """Admit a row whose first `num_computed` tokens are in shared blocks.

        `clear_new` must follow when all rows of a step are admitted.
        """
        for seen, size in zip(self._seen, self._sizes, strict=True):
            seen[row] = num_computed // size

    def clear_new(self) -> None:
        """Initialize the blocks that rows got since the last call, which held other tokens before."""
        for table, counts, seen, size in zip(self._tables, self._counts, self._seen, self._sizes, strict=True):
            for row in np.flatnonzero(counts > seen):
                self._read_np[table[row, seen[row] : counts[row]]] = size if self._keeps_up else 0
                seen[row] = counts[row]

    def count_read(self, row: int, num_computed: int) -> int:
        """Return how many of the `num_computed` tokens of an admitted row the drafter has read."""
        reach = num_computed
        for table, size in zip(self._tables, self._sizes, strict=True):
            blocks = table[row, : -(-num_computed // size)]
            end_np = np.minimum(size, num_computed - size * np.arange(len(blocks)))
            if (short := np.flatnonzero((blocks > 0) & (self._read_np[blocks] < end_np))).size:
                reach = min(reach, int(short[0]) * size + int(self._read_np[blocks[short[0]]]))
        return reach

    def forget(self, row: int) -> None:
        """Mark all blocks of a row as unread."""
        for table, counts in zip(self._tables, self._counts, strict=True):
            self._read_np[table[row, : counts[row]]] = 0

    def record_read(self, rows_np: np.ndarray, begins_np: np.ndarray, ends_np: np.ndarray) -> None:
        """Record that the drafter has read rows from `begins_np` up to `ends_np`."""
        for table, size in zip(self._tables, self._sizes, strict=True):
            first_np = begins_np // size
            count_np = -(-ends_np // size) - first_np
            # One entry per block: its row, and its index in the row's table.
            row_np = np.repeat(np.arange(len(rows_np)), count_np)
            index_np = np.arange(len(row_np)) + (first_np + count_np - np.cumsum(count_np))[row_np]
            blocks_np = table[rows_np[row_np], index_np]
            self._read_np[blocks_np] = np.minimum(size, ends_np[row_np] - size * index_np)

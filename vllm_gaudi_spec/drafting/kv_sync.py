"""Drafter KV sync: the drafter's KV and states follow what the target computes and accepts.

One class a kind of drafter. The base keeps nothing; `DraftModelKVSync` and `HeadKVSync` are beside their proposers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_spec.records import Batch, DraftBatch, Drafts, Hidden, Request, SampledRows
    from vllm_gaudi_spec.runner.graphs import Job
    from vllm_gaudi_spec.runner.requests import Requests


class DrafterKVSync:
    """A drafter without KV or states: it looks at the request state alone, so every event here is a no-op."""

    has_kv = False
    """Whether rounds of drafts read and write KV of the drafter's own."""
    reads_every_step = False
    """Whether something is read after each verification, drafts or no drafts."""

    # --- host ---

    def on_admitted(self) -> None:
        """Requests were admitted: `requests.admitted`."""

    def on_forward(self, batch: Batch) -> None:
        """The target has computed a batch."""

    def before_round(self, sampled: SampledRows, max_drafts_np: np.ndarray, batch: DraftBatch | None) -> None:
        """After each verification. `max_drafts_np`: of each request now. `batch`: the rows on the device, for a drafter
        with KV, if a round follows or `reads_every_step` is set."""

    def on_drafted(self, requests: list[Request], max_drafts_np: np.ndarray) -> None:
        """A round was run."""

    def invalidate(self, requests: list[Request]) -> None:
        """A read of these requests failed, or its KV may be wrong."""

    def on_faulty(self, requests: list[Request]) -> None:
        """Drafts of these requests could not be used: the KV that was read may be wrong."""

    # --- device: parts of the sampling pass and of a round ---

    def on_verified(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> None:
        """Rows have `lengths_B` tokens now."""

    def draftable(self, rows_B: torch.Tensor, lengths_B: torch.Tensor, max_drafts_B: torch.Tensor) -> torch.Tensor:
        """int32 [B]: `max_drafts_B`, or less for rows of which too little was read."""
        return max_drafts_B

    def hidden(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> Hidden | None:
        """The states that the first draft of each row follows from, for drafters that read hidden states."""
        return None

    def on_round_written(self, rows_B: torch.Tensor, lengths_B: torch.Tensor, drafts: Drafts) -> None:
        """Drafts and their KV were written."""

    # --- warm-up ---

    def jobs(self) -> Iterator[Job]:
        """Reads and changes of the state; not rounds."""
        yield from ()


class ReadBlocks:
    """Which KV blocks a drafter has read.

    vLLM shares blocks between requests by what the target has written in them. The drafter's half of a block may be
    missing: speculation was off for its request, or at that load. Such a block does not count as read.
    """

    def __init__(self, requests: Requests, num_blocks: int, groups: list[int], *, keeps_up: bool = False) -> None:
        """`groups`: the KV cache groups that hold layers of the drafter. `keeps_up`: it reads all that the target
        does, except what `forget` names."""
        self._tables = [requests.tables_np[group] for group in groups]
        self._sizes = [requests.block_sizes[group] for group in groups]
        self._counts = [requests.num_blocks[group] for group in groups]
        self._read_np = np.zeros(num_blocks, dtype=np.int32)
        """How many tokens at the beginning of each block the drafter has read. Block 0 is padding."""
        self._seen = [np.zeros_like(counts) for counts in self._counts]
        """Blocks of each row that were cleared, or taken over, when they came."""
        self._keeps_up = keeps_up

    def admit(self, row: int, num_computed: int) -> None:
        """The blocks of a row that are computed were another's; the rest are new. `clear_new` follows, when all rows of
        a step are known."""
        for seen, size in zip(self._seen, self._sizes, strict=True):
            seen[row] = num_computed // size

    def clear_new(self) -> None:
        """Blocks that rows got since the last call held something else before."""
        for table, counts, seen, size in zip(self._tables, self._counts, self._seen, self._sizes, strict=True):
            for row in np.flatnonzero(counts > seen):
                self._read_np[table[row, seen[row] : counts[row]]] = size if self._keeps_up else 0
                seen[row] = counts[row]

    def reach(self, row: int, num_computed: int) -> int:
        """How many of the `num_computed` tokens of an admitted row the drafter has read."""
        reach = num_computed
        for table, size in zip(self._tables, self._sizes, strict=True):
            blocks = table[row, : -(-num_computed // size)]
            end_np = np.minimum(size, num_computed - size * np.arange(len(blocks)))
            if (short := np.flatnonzero((blocks > 0) & (self._read_np[blocks] < end_np))).size:
                reach = min(reach, int(short[0]) * size + int(self._read_np[blocks[short[0]]]))
        return reach

    def forget(self, row: int) -> None:
        """Counts nothing of a row as read."""
        for table, counts in zip(self._tables, self._counts, strict=True):
            self._read_np[table[row, : counts[row]]] = 0

    def note(self, rows_np: np.ndarray, begins_np: np.ndarray, ends_np: np.ndarray) -> None:
        """The drafter has read rows up to `ends_np`, beyond `begins_np`, up to which that is recorded."""
        for table, size in zip(self._tables, self._sizes, strict=True):
            first_np = begins_np // size
            count_np = -(-ends_np // size) - first_np
            # One entry a block: its row, and its index in the row's table.
            row_np = np.repeat(np.arange(len(rows_np)), count_np)
            index_np = np.arange(len(row_np)) + (first_np + count_np - np.cumsum(count_np))[row_np]
            blocks_np = table[rows_np[row_np], index_np]
            self._read_np[blocks_np] = np.minimum(size, ends_np[row_np] - size * index_np)

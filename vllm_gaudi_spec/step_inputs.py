"""Inputs that a step copies to the device: several int32 arrays, packed into one tensor and split inside the graph.

`StepInputs` is the copy for a forward pass; `SamplePass` in `sampling/params.py` is the copy for a sampling pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_gaudi_spec.attention.metadata import Blocks


class HostBlocks(NamedTuple):
    """Host version of `Blocks`, which `StepInputs.pack` copies to the device."""

    tables: tuple[np.ndarray, ...] = ()
    sizes: tuple[int, ...] = ()
    flat: tuple[np.ndarray, ...] = ()
    lengths_B: torch.Tensor | None = None
    counts_B: torch.Tensor | None = None


def make_host_lengths(num_rows: int, ends: Sequence[int], context: int) -> torch.Tensor:
    """Return `Blocks.lengths_B`, for devices whose attention needs it (`DeviceTraits.needs_host_lengths`).

    At the end of the graph, the first rows have at most `ends` KV tokens, and at most `context`, which is the number of
    tokens that fit in their blocks. All other rows are padding, which attends to one key.
    """
    lengths_np = np.ones(num_rows, dtype=np.int32)
    lengths_np[: len(ends)] = np.clip(ends, 1, context)
    return torch.from_numpy(lengths_np)


def make_host_counts(num_rows: int, counts: Sequence[int]) -> torch.Tensor:
    """Return `Blocks.counts_B`, with 0 for padding rows."""
    counts_np = np.zeros(num_rows, dtype=np.int32)
    counts_np[: len(counts)] = counts
    return torch.from_numpy(counts_np)


_SECTION = 16
"""Alignment of sections in a packed tensor, in elements. Kernels prefer aligned addresses."""


class Packing(NamedTuple):
    """Several int32 tensors that are packed into one tensor, copied to the device once, and split inside the graph."""

    packed: torch.Tensor
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def pack(cls, arrays: Sequence[np.ndarray], upload: Callable[[torch.Tensor], torch.Tensor]) -> Packing:
        packed_np = np.zeros(sum(_round_up(array.size) for array in arrays), dtype=np.int32)
        begin = 0
        for array in arrays:
            packed_np[begin : begin + array.size] = array.reshape(-1)
            begin += _round_up(array.size)
        return cls(upload(torch.from_numpy(packed_np)), tuple(array.shape for array in arrays))

    def split(self) -> list[torch.Tensor]:
        """Return the tensors as views."""
        parts, begin = [], 0
        for shape in self.shapes:
            size = math.prod(shape)
            parts.append(self.packed.narrow(0, begin, size).view(shape))
            begin += _round_up(size)
        return parts


def _round_up(size: int) -> int:
    return -(-size // _SECTION) * _SECTION


class RowInputs(NamedTuple):
    """The contents of `StepInputs` after splitting inside a graph."""

    rows_B: torch.Tensor
    """int64: rows in the request state. Padding uses the pad row."""
    starts_B: torch.Tensor
    """int32: position of the first token in each row, as known to the host."""
    counts_B: torch.Tensor
    """int32: number of tokens in each row."""
    max_drafts_B: torch.Tensor
    """int32: maximum number of drafts in each row after this step, in addition to the limits of the request."""
    more_BX: torch.Tensor | None
    """int32: additional data for each row from a host drafter."""
    blocks: Blocks


class StepInputs(NamedTuple):
    """Everything that a forward pass needs from the host, in a single copy: rows, start positions and KV blocks."""

    packing: Packing
    block_sizes: tuple[int, ...]
    has_more: bool
    lengths_B: torch.Tensor | None
    counts_B: torch.Tensor | None
    """`Blocks.lengths_B` and `Blocks.counts_B`, which stay on the host."""

    @classmethod
    def pack(
        cls,
        header_4B: np.ndarray,
        blocks: HostBlocks,
        upload: Callable[[torch.Tensor], torch.Tensor],
        more_BX: np.ndarray | None = None,
    ) -> StepInputs:
        """Pack the inputs and copy them to the device. `header_4B` contains rows, starts, counts and draft limits, in
        the order of `RowInputs`."""
        more = [] if more_BX is None else [more_BX]
        packing = Packing.pack([header_4B, *blocks.tables, *blocks.flat, *more], upload)
        return cls(packing, blocks.sizes, more_BX is not None, blocks.lengths_B, blocks.counts_B)

    @property
    def num_rows(self) -> int:
        return self.packing.shapes[0][1]

    def split(self) -> RowInputs:
        """Split the copy into its tensors. This method runs inside a graph."""
        header_4B, *rest = self.packing.split()
        more_BX = rest.pop() if self.has_more else None
        num_groups = len(self.block_sizes)
        blocks = Blocks(
            tuple(rest[:num_groups]), self.block_sizes, tuple(rest[num_groups:]), self.lengths_B, self.counts_B
        )
        rows_B, starts_B, counts_B, max_drafts_B = header_4B.unbind(0)
        return RowInputs(rows_B.long(), starts_B, counts_B, max_drafts_B, more_BX, blocks)

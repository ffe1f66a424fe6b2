"""Prompt chunks as several rows."""

from types import SimpleNamespace
from typing import Any

import torch

from vllm_gaudi_spec.slices import count_before_slices, cut_chunk, keep_last_slices

PAD = 9


def test_slices_cover_a_chunk_in_order() -> None:
    request: Any = SimpleNamespace(num_computed=7)
    for count in range(1, 40):
        slices = list(cut_chunk(request, count, 16))
        positions = [piece.start + offset for piece in slices for offset in range(piece.count)]
        assert positions == list(range(7, 7 + count))
        assert all(piece.count == 16 for piece in slices[:-1])


def test_only_the_last_slice_of_a_row_is_kept() -> None:
    rows = torch.tensor([3, 3, 3, 1, 0, 0, PAD, PAD])
    assert keep_last_slices(rows, PAD).tolist() == [PAD, PAD, 3, 1, PAD, 0, PAD, PAD]
    full = torch.tensor([2, 2, 4, 4])
    assert keep_last_slices(full, PAD).tolist() == [PAD, 2, PAD, 4]


def test_tokens_before_a_slice_are_those_of_its_chunk() -> None:
    rows = torch.tensor([3, 3, 3, 1, 0, 0, PAD, PAD])
    starts = torch.tensor([32, 48, 64, 5, 0, 16, 0, 0], dtype=torch.int32)
    assert count_before_slices(rows, starts).tolist() == [0, 16, 32, 0, 0, 16, 0, 0]

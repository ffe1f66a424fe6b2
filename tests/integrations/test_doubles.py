"""The doubles do what is written of the operators in whose places they stand."""

from __future__ import annotations

import pytest
import torch


def row_of(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("ends", "ids", "positions", "rejected", "last"),
    [
        ([2, 4], [1, 2, 3, 70, 4, 5, 80], [5, 6, 7, 8, 0, 1, 2], [0] * 7, [3, 6]),
        ([0, 4], [1, 70, 99, 99, 4, 5, 80], [5, 6, 0, 0, 0, 1, 2], [0, 0, 1, 1, 0, 0, 0], [1, 6]),
        ([2, 3], [1, 2, 3, 70, 4, 80, 99], [5, 6, 7, 8, 0, 1, 0], [0] * 6 + [1], [3, 5]),
    ],
)
def test_rows_of_a_draft_model_have_one_place_more(
    ends: list[int], ids: list[int], positions: list[int], rejected: list[int], last: list[int]
) -> None:
    """Two rows of three and two tokens: each as far as its end, what follows, then padding of 99 at position 0."""
    found = torch.ops._C_ascend.npu_copy_and_expand_eagle_inputs(
        row_of([1, 2, 3, 4, 5]),
        row_of([5, 6, 7, 0, 1]),
        row_of([70, 80]),
        row_of([0, 3, 5]),
        row_of(ends),
        99,
        0,
        1,
        False,
        7,
    )
    assert [tensor.tolist() for tensor in (found[0], found[1], found[2], found[4])] == [ids, positions, rejected, last]

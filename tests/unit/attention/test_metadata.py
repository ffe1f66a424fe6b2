"""The inputs of a rectangle, in which padding looks nothing up."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_gaudi_spec.attention import row_operations
from vllm_gaudi_spec.attention.metadata import Blocks, build_columns, build_rectangle


class NoPermutedInt64(TorchDispatchMode):
    """Fails on a permutation of int64, which breaks a Gaudi's compiled graph (quirk C16)."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        permutes = operation in (torch.ops.aten.permute.default, torch.ops.aten.t.default, torch.ops.aten.transpose.int)
        assert not (permutes and args[0].dtype == torch.int64), operation
        return operation(*args, **(kwargs or {}))


def test_padding_may_extend_past_the_block_table() -> None:
    tokens_BQ = torch.arange(12, dtype=torch.int32).view(2, 6)
    starts_B, num_real_B = torch.tensor([5, 0], dtype=torch.int32), torch.tensor([3, 6], dtype=torch.int32)
    table_BW = torch.tensor([[7, 3], [9, 2]], dtype=torch.int32)
    inputs = build_rectangle(tokens_BQ, starts_B, num_real_B, Blocks((table_BW,), (4,)), row_operations.TORCH)
    (slots,) = inputs.slots
    assert slots.view(2, 6).tolist() == [[13, 14, 15, 3, 0, 1], [36, 37, 38, 39, 8, 9]]
    assert inputs.positions_T.view(2, 6).tolist() == [[5, 6, 7, 0, 0, 0], [0, 1, 2, 3, 4, 5]]
    assert inputs.token_ids_T.view(2, 6).tolist() == [[0, 1, 2, 0, 0, 0], [6, 7, 8, 9, 10, 11]]


def test_columns_equal_rectangles_of_one_query() -> None:
    tokens_BQ = torch.zeros(3, 3, dtype=torch.int32)
    starts_B, num_real_B = torch.tensor([5, 0, 3], dtype=torch.int32), torch.tensor([2, 3, -1], dtype=torch.int32)
    lengths = torch.ones(3, dtype=torch.int32)
    blocks = Blocks((torch.tensor([[7, 3], [9, 2], [5, 6]], dtype=torch.int32),), (4,), (), lengths, lengths)
    with NoPermutedInt64():
        made = build_columns(starts_B, num_real_B, 3, blocks, row_operations.TORCH)
    assert len(made) == 3
    for query, column in enumerate(made):
        real_B = num_real_B > query
        alone = build_rectangle(
            tokens_BQ[:, query : query + 1],
            torch.where(real_B, starts_B + query, 0),
            real_B.int(),
            blocks,
            row_operations.TORCH,
        )
        for ours, expected in (
            (column.token_ids_T, alone.token_ids_T),
            (column.positions_T, alone.positions_T),
            (column.num_real_B, alone.num_real_B),
            (column.calls[0].starts_B, alone.calls[0].starts_B),
            (column.slots[0][real_B], alone.slots[0][real_B]),
        ):
            assert ours.dtype == expected.dtype
            # Kernels index a row's entries.
            assert ours.is_contiguous()
            assert torch.equal(ours, expected)
        pads = column.slots[0][~real_B]
        assert (pads < 4).all(), "padding belongs in the pad block"
        assert len(pads.unique()) == len(pads)
        assert (column.calls[0].num_rows, column.calls[0].num_queries) == (3, 1)
        assert column.calls[0].host_counts_B is None, "those of the rectangle"

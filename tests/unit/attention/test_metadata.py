"""The inputs of a rectangle: where padding is, nothing is looked up."""

from __future__ import annotations

import torch

from vllm_gaudi_spec.attention.metadata import Blocks, rectangle


def test_padding_may_extend_past_the_block_table() -> None:
    tokens_BQ = torch.arange(12, dtype=torch.int32).view(2, 6)
    starts_B, num_real_B = torch.tensor([5, 0], dtype=torch.int32), torch.tensor([3, 6], dtype=torch.int32)
    table_BW = torch.tensor([[7, 3], [9, 2]], dtype=torch.int32)
    inputs = rectangle(tokens_BQ, starts_B, num_real_B, Blocks((table_BW,), (4,)))
    (slots,) = inputs.slots
    assert slots.view(2, 6).tolist() == [[13, 14, 15, 3, 0, 1], [36, 37, 38, 39, 8, 9]]
    assert inputs.positions_T.view(2, 6).tolist() == [[5, 6, 7, 0, 0, 0], [0, 1, 2, 3, 4, 5]]
    assert inputs.token_ids_T.view(2, 6).tolist() == [[0, 1, 2, 0, 0, 0], [6, 7, 8, 9, 10, 11]]

"""Moving weights to a Gaudi. The meta device stands for the card, since only devices are compared."""

import torch
from torch import nn

from vllm_gaudi_spec.devices.hpu.backend import _move_plain_tensors

CARD = torch.device("meta")


def test_s16_unregistered_tensors_move_to_the_card() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, second = model
    shared = torch.zeros(3)
    first.table = second.table = shared
    second.number = torch.tensor(2.0)
    second.scale_inv, second.scale_members = torch.ones(1), {"scale_inv"}
    model.to(CARD)
    assert first.table.device.type == "cpu"
    _move_plain_tensors(model, CARD)
    assert first.table.device == CARD
    assert first.table is second.table
    assert second.number.device.type == second.scale_inv.device.type == "cpu"
    assert [parameter.device for parameter in model.parameters()] == [CARD] * 4

"""A Gaudi without a card: what its platform refuses, and which tensors move to it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.hpu import platform as hpu
from vllm_gaudi_spec.devices.hpu.backend import _move_plain_tensors


@pytest.mark.parametrize(("dtype", "refused"), [("float16", True), ("bfloat16", False), ("float32", False)])
def test_s17_float16_is_refused(dtype: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to load and fail in the card's self-test with an error that named the card's software."""
    monkeypatch.setattr(hpu, "set_gaudi_defaults", lambda: None)
    monkeypatch.setattr(hpu.CapturingPlatform, "check_and_update_config", lambda config: None)
    model = SimpleNamespace(model="MODEL", dtype=getattr(torch, dtype))
    config: Any = SimpleNamespace(model_config=model)
    if not refused:
        hpu.HpuSpecPlatform.check_and_update_config(config)
        return
    with pytest.raises(UnsupportedConfigError, match="MODEL is not served in float16 on a Gaudi; use --dtype bfloat16"):
        hpu.HpuSpecPlatform.check_and_update_config(config)


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

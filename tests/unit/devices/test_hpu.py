"""A Gaudi without a card: what its platform refuses, and which tensors move to it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.hpu import communicator
from vllm_gaudi_spec.devices.hpu import platform as hpu
from vllm_gaudi_spec.devices.hpu.backend import _move_plain_tensors
from vllm_gaudi_spec.upstream.layers import RowParallelLinear


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


class RowParallel(RowParallelLinear):
    """Notes the tokens of each call. Its bias is left to the caller."""

    def __init__(self, *, tp_size: int, reduce_results: bool = True, return_bias: bool = True) -> None:
        nn.Module.__init__(self)
        self.tp_size, self.reduce_results, self.return_bias = tp_size, reduce_results, return_bias
        self.tokens: list[int] = []

    def forward(self, input_: torch.Tensor) -> Any:
        self.tokens.append(len(input_))
        return (2 * input_, torch.ones(3)) if self.return_bias else 2 * input_


def test_long_inputs_of_row_parallel_layers_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "gaudi_chunks", lambda: (4, 8))
    layers = [RowParallel(tp_size=2), RowParallel(tp_size=2, return_bias=False)]
    others = [RowParallel(tp_size=1), RowParallel(tp_size=2, reduce_results=False)]
    communicator.split_long_prompts(nn.Sequential(*layers, *others))
    short, long = torch.arange(21.0).view(7, 3), torch.arange(30.0).view(10, 3)
    for layer in (*layers, *others):
        for tokens in (short, long):
            result = layer(tokens)
            output, bias = result if layer.return_bias else (result, torch.ones(3))
            assert output.equal(2 * tokens)
            assert bias.equal(torch.ones(3))
    assert [layer.tokens for layer in layers] == [[7, 3, 3, 3, 1]] * 2
    assert [layer.tokens for layer in others] == [[7, 10]] * 2

"""A model that computes no padding returns the same, and passes the right states to heads."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from vllm_gaudi_spec import model as loaded_model
from vllm_gaudi_spec.attention import row_operations
from vllm_gaudi_spec.attention.metadata import Blocks, Inputs, build_rectangle
from vllm_gaudi_spec.model import LoadedModel
from vllm_gaudi_spec.records import Hidden

COUNTS_B = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
REAL = [0, 1, 6, 7, 8, 9]
PADDING = [2, 3, 4, 5, 10, 11]


class Model:
    """States and logits that differ by token, position and carried states."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, carried_TH: Any = 0.0) -> torch.Tensor:
        self.rows.append(len(tokens_T))
        states_T1 = 1.0 + tokens_T[:, None] + 100 * positions_T[:, None]
        return torch.cat((states_T1, -states_T1), 1) + carried_TH

    def compute_logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(hidden_NH))
        return hidden_NH @ torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 5.0]])


@pytest.fixture(autouse=True)
def no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_model, "set_forward_context", lambda *_, **__: nullcontext())


def model(packs: bool, hidden_of: Any) -> LoadedModel:
    loaded: Any = LoadedModel.__new__(LoadedModel)
    loaded.model, loaded.vllm_config, loaded.measuring, loaded._packs = Model(), None, None, packs
    loaded.adapters = None
    loaded.group, loaded._is_in_step, loaded._num_in_context, loaded._returns_hidden_states = None, False, 1, False
    loaded.set_outputs(lambda states, _: hidden_of(states))
    loaded._groups = [["layer"]]
    return loaded


def inputs() -> Inputs:
    blocks = Blocks((torch.ones(4, 1, dtype=torch.int32),), (16,))
    tokens_BQ = torch.arange(12, dtype=torch.int32).view(4, 3)
    return build_rectangle(
        tokens_BQ, torch.tensor([4, 0, 7, 1], dtype=torch.int32), COUNTS_B, blocks, row_operations.TORCH
    )


def test_ranks_in_step_compute_as_many_tokens_each() -> None:
    """A head packs its own tokens, and still tells vLLM the number of ranks."""
    together, head = (model(True, Hidden) for _ in range(2))
    together._is_in_step, together._num_in_context, head._num_in_context = True, 2, 2
    together.forward(inputs())
    head.forward(inputs())
    assert (together.model.rows, head.model.rows) == ([12], [len(REAL)])


@pytest.mark.parametrize("carries", [False, True])
@pytest.mark.parametrize(
    "hidden_of",
    [Hidden, lambda states: Hidden(states, states), lambda states: Hidden(states, 2 * states)],
    ids=["nothing", "the same", "another"],
)
def test_states(hidden_of: Any, carries: bool) -> None:
    carried_TH = torch.rand(12, 2, generator=torch.Generator().manual_seed(0)) if carries else None
    packing, whole = model(True, hidden_of), model(False, hidden_of)
    ours, expected = packing.forward(inputs(), carried_TH), whole.forward(inputs(), carried_TH)
    assert packing.model.rows == [len(REAL)]
    assert whole.model.rows == [12]
    assert (ours.carried is None) == (expected.carried is None)
    for states, wanted in zip(ours, expected, strict=True):
        if wanted is not None:
            assert torch.equal(states[REAL], wanted[REAL])
            assert not states[PADDING].any()


def test_logits() -> None:
    packing, whole = model(True, Hidden), model(False, Hidden)
    hidden_NH = torch.rand(12, 2, generator=torch.Generator().manual_seed(1)) + 1
    ours, expected = (loaded.compute_row_logits(hidden_NH, COUNTS_B) for loaded in (packing, whole))
    assert packing.model.rows == [len(REAL)]
    assert torch.equal(ours[REAL], expected[REAL])
    assert not ours[PADDING].any()

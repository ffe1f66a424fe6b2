"""The recurrent state of each request: by row, kept as it was before the tokens whose acceptance is not yet decided.

A row's state stands at a position of its text. A prompt chunk moves it to the chunk's end. A decode whose drafts may be
rejected leaves the state where it is, and what it has read beside it: the next forward of the row begins at the first
token that was not accepted, so the device knows how many of them to read again, into the state, before its own. So
there is one state a row and not one for each draft, and nothing waits for the host.

Letters as in `scans.py`; R rows of the request state, P pending tokens, k + 1 with drafts and 0 without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch

from vllm_gaudi_spec.attention.metadata import StateCall
from vllm_gaudi_spec.attention.operations import finite
from vllm_gaudi_spec.recurrent.scans import convolve


class LayerShape(NamedTuple):
    """What a layer keeps of a row."""

    num_channels: int
    """Of the convolution."""
    num_taps: int
    num_gates: int
    """Of a token, besides what is convolved; 0 for a layer that makes them of that, or has none."""
    state: tuple[int, ...]
    """Empty for such a layer."""
    dtype: torch.dtype
    """Of inputs and gates."""
    state_dtype: torch.dtype

    def num_bytes(self, num_pending: int) -> int:
        """Of a row."""
        num_inputs = (self.num_taps - 1 + num_pending) * self.num_channels + num_pending * self.num_gates
        return num_inputs * self.dtype.itemsize + (prod(self.state) if self.state else 0) * self.state_dtype.itemsize


Recurrence = Callable[
    [torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor],
    tuple[torch.Tensor, torch.Tensor],
]
"""From what was convolved [B, Q, C], the gates [B, Q, G] or None, which positions count [B, Q] and the state before
them, to the outputs [B, Q, ...] and the state after those that count."""


class LayerState:
    """A layer's states of all rows. Each is a tensor that is changed as a whole."""

    def __init__(self, shape: LayerShape, num_rows: int, num_pending: int, device: torch.device) -> None:
        self._num_before = shape.num_taps - 1
        self._num_pending = num_pending
        width = self._num_before + num_pending
        self.inputs_RWC = torch.zeros(num_rows, width, shape.num_channels, dtype=shape.dtype, device=device)
        """Of the convolution: those before a row's position, and the pending ones after it."""
        self.gates_RPG: torch.Tensor | None = None
        """Of the pending tokens, for a layer that does not make them of its inputs,"""
        self.state: torch.Tensor | None = None
        """and the state before them; None for a layer that is its convolution alone."""
        if shape.num_gates:
            self.gates_RPG = torch.zeros(num_rows, num_pending, shape.num_gates, dtype=shape.dtype, device=device)
        if shape.state:
            self.state = torch.zeros(num_rows, *shape.state, dtype=shape.state_dtype, device=device)

    def copy_rows(self, sources_N: torch.Tensor, targets_N: torch.Tensor) -> None:
        """Without gates: they are of pending tokens, and a state is copied where none is pending."""
        for tensor in (self.inputs_RWC, self.state):
            if tensor is not None:
                _write(tensor, targets_N, tensor.index_select(0, sources_N))

    def follow(
        self,
        call: StateCall,
        inputs_BQC: torch.Tensor,
        gates_BQG: torch.Tensor | None,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        recurrence: Recurrence,
    ) -> torch.Tensor:
        """The layer's outputs for a rectangle, [B, Q, ...]. A layer without a state returns what it convolved."""
        # Positions of a row meet in matmuls: of a draft that is rejected nothing may reach those before it.
        inputs_BQC, gates_BQG = finite(inputs_BQC), None if gates_BQG is None else finite(gates_BQG)
        inputs_BWC = _unless(call.starts_B == 0, self.inputs_RWC.index_select(0, call.rows_B))
        # Of the pending inputs those that were accepted come before the first of this rectangle.
        before_BWC = _from(inputs_BWC, call.num_pending_B, self._num_before)
        out_BQ = convolve(before_BWC, inputs_BQC, weight_CW, bias_C)
        if self.state is not None:
            state = self._state_before(call, inputs_BWC, weight_CW, bias_C, recurrence)
            out_BQ, after = recurrence(out_BQ, gates_BQG, _first(call.num_real_B, call.num_queries), state)
            self._keep(call, gates_BQG, after if call.commits else state)
        everything_BWC = torch.cat((before_BWC, inputs_BQC), dim=1)
        if call.commits:
            everything_BWC = _from(everything_BWC, call.num_real_B, self._num_before)
        _write(self.inputs_RWC, call.rows_B, _widened(everything_BWC, self.inputs_RWC.shape[1]))
        return out_BQ

    def _state_before(
        self,
        call: StateCall,
        inputs_BWC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        recurrence: Recurrence,
    ) -> torch.Tensor:
        """The rows' states before a rectangle: with the pending tokens that were accepted."""
        assert self.state is not None
        state = _unless(call.starts_B == 0, self.state.index_select(0, call.rows_B).float())
        if not self._num_pending:
            return state
        before_BWC, pending_BPC = inputs_BWC.split([self._num_before, self._num_pending], dim=1)
        convolved_BPC = convolve(before_BWC, pending_BPC, weight_CW, bias_C)
        gates_BPG = None if self.gates_RPG is None else self.gates_RPG.index_select(0, call.rows_B)
        return recurrence(convolved_BPC, gates_BPG, _first(call.num_pending_B, self._num_pending), state)[1]

    def _keep(self, call: StateCall, gates_BQG: torch.Tensor | None, state: torch.Tensor) -> None:
        assert self.state is not None
        _write(self.state, call.rows_B, state)
        if self.gates_RPG is not None and not call.commits:
            assert gates_BQG is not None
            _write(self.gates_RPG, call.rows_B, _widened(gates_BQG, self._num_pending))


class RecurrentStates:
    """The states of a model's layers, and how far each row's have come."""

    def __init__(
        self, layers: Sequence[tuple[str, LayerShape]], *, num_rows: int, num_pending: int, device: torch.device
    ) -> None:
        """`num_rows`: the pad row included, whose state is that of nobody, so padding may write there; and rows of no
        request, which keep snapshots."""
        self.by_layer = {name: LayerState(shape, num_rows, num_pending, device) for name, shape in layers}
        self._num_pending = num_pending
        self._positions_R = torch.zeros(num_rows, dtype=torch.int32, device=device)
        """How many tokens of a row its states have read."""

    def call(
        self,
        rows_B: torch.Tensor,
        starts_B: torch.Tensor,
        num_real_B: torch.Tensor,
        num_queries: int,
        *,
        is_prompt: bool,
    ) -> StateCall:
        num_pending_B = starts_B - self._positions_R.index_select(0, rows_B)
        return StateCall(
            rows_B=rows_B,
            starts_B=starts_B,
            num_real_B=num_real_B,
            num_pending_B=torch.where(starts_B == 0, 0, num_pending_B).clamp(0, self._num_pending),
            num_queries=num_queries,
            commits=is_prompt or not self._num_pending,
        )

    def advance(self, call: StateCall) -> None:
        """After all layers have read the rectangle."""
        positions_B = call.starts_B + call.num_real_B if call.commits else call.starts_B
        self._positions_R.index_copy_(0, call.rows_B, positions_B.int())

    def copy_rows(self, sources_N: torch.Tensor, targets_N: torch.Tensor) -> None:
        """Of rows whose newest forward was a prompt chunk, or that are such copies: their states have read all."""
        for layer in self.by_layer.values():
            layer.copy_rows(sources_N, targets_N)
        self._positions_R.index_copy_(0, targets_N, self._positions_R.index_select(0, sources_N))


def _unless(is_first_B: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Zero for rows whose text begins: what is there is another request's."""
    return torch.where(is_first_B.view(-1, *[1] * (tensor.dim() - 1)), 0.0, tensor)


def _first(num_B: torch.Tensor, width: int) -> torch.Tensor:
    """bool [B, width]"""
    return torch.arange(width, dtype=torch.int32, device=num_B.device) < num_B[:, None]


def _from(inputs_BWC: torch.Tensor, first_B: torch.Tensor, count: int) -> torch.Tensor:
    """[B, count, C]: of each row, those from `first_B` on."""
    rows, width, _ = inputs_BWC.shape
    offsets = torch.arange(count, dtype=torch.int32, device=first_B.device)
    row_B1 = torch.arange(rows, dtype=torch.int32, device=first_B.device)[:, None] * width
    index = (row_B1 + first_B[:, None] + offsets).flatten()
    return inputs_BWC.flatten(0, 1).index_select(0, index).unflatten(0, (rows, count))


def _write(tensor: torch.Tensor, rows_B: torch.Tensor, values: torch.Tensor) -> None:
    tensor.index_copy_(0, rows_B, values.to(tensor.dtype))


def _widened(tensor_BQC: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - tensor_BQC.shape[1]
    return torch.nn.functional.pad(tensor_BQC, (0, 0, 0, missing)) if missing else tensor_BQC

"""The recurrent states of requests. They do not include tokens that may still be rejected.

The state of a row belongs to a position in the row's text. A prompt chunk advances the state to the end of the chunk. A
decode with drafts leaves the state unchanged and stores its inputs separately, as pending tokens. The row's next
forward pass starts after the last accepted token, which tells the device how many pending tokens to apply to the state
first. As a result, there is one state per row rather than one per draft, and no step waits for the host.

Dimensions have the same letters as in `scans.py`. R: rows in the request state. P: pending tokens (k + 1 with drafts, 0
without).
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
    """The shapes and dtypes of what a layer stores for each row."""

    num_channels: int
    """The number of convolution channels."""
    num_taps: int
    num_gates: int
    """The number of gates per token in addition to the convolved inputs, or 0 if there are none or they are computed
    from the inputs."""
    state: tuple[int, ...]
    """The shape of the recurrent state, which is empty for a layer that consists only of a convolution."""
    dtype: torch.dtype
    """The dtype of inputs and gates."""
    state_dtype: torch.dtype

    def num_bytes(self, num_pending: int) -> int:
        num_inputs = (self.num_taps - 1 + num_pending) * self.num_channels + num_pending * self.num_gates
        return num_inputs * self.dtype.itemsize + (prod(self.state) if self.state else 0) * self.state_dtype.itemsize


Recurrence = Callable[
    [torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor],
    tuple[torch.Tensor, torch.Tensor],
]
"""Maps the outputs of the convolution [B, Q, C], the gates [B, Q, G] or None, the mask of real positions [B, Q], and
the state before these positions to the outputs [B, Q, ...] and the state after the real positions."""


class LayerState:
    """The states of a layer for all rows. The tensors are never written through views."""

    def __init__(self, shape: LayerShape, num_rows: int, num_pending: int, device: torch.device) -> None:
        self._num_before = shape.num_taps - 1
        self._num_pending = num_pending
        width = self._num_before + num_pending
        self.inputs_RWC = torch.zeros(num_rows, width, shape.num_channels, dtype=shape.dtype, device=device)
        """The inputs of the convolution: the last ones before the row's position, followed by those of pending
        tokens."""
        self.gates_RPG: torch.Tensor | None = None
        """The gates of pending tokens, or None for a layer that computes gates from its inputs."""
        self.state: torch.Tensor | None = None
        """The state before the pending tokens, or None for a layer that consists only of a convolution."""
        if shape.num_gates:
            self.gates_RPG = torch.zeros(num_rows, num_pending, shape.num_gates, dtype=shape.dtype, device=device)
        if shape.state:
            self.state = torch.zeros(num_rows, *shape.state, dtype=shape.state_dtype, device=device)

    def copy_rows(self, sources_N: torch.Tensor, targets_N: torch.Tensor) -> None:
        """Copy rows that have no pending tokens. Their gates are not copied, because only pending tokens have gates."""
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
        """Update the states with a padded batch, and return the outputs [B, Q, ...] of the recurrence, or of the
        convolution if there is no recurrent state."""
        # Matmuls combine the positions of a row, so NaN from a rejected draft would spread to earlier positions.
        inputs_BQC, gates_BQG = finite(inputs_BQC), None if gates_BQG is None else finite(gates_BQG)
        inputs_BWC = _zero_if(call.starts_B == 0, self.inputs_RWC.index_select(0, call.rows_B))
        # Accepted pending inputs precede the first new input.
        before_BWC = _slice_rows(inputs_BWC, call.num_pending_B, self._num_before)
        out_BQ = convolve(before_BWC, inputs_BQC, weight_CW, bias_C)
        if self.state is not None:
            state = self._state_before(call, inputs_BWC, weight_CW, bias_C, recurrence)
            out_BQ, after = recurrence(out_BQ, gates_BQG, _mask_first(call.num_real_B, call.num_queries), state)
            _write(self.state, call.rows_B, after if call.commits else state)
        if self.gates_RPG is not None and not call.commits:
            assert gates_BQG is not None
            _write(self.gates_RPG, call.rows_B, _pad_to(gates_BQG, self._num_pending))
        everything_BWC = torch.cat((before_BWC, inputs_BQC), dim=1)
        if call.commits:
            everything_BWC = _slice_rows(everything_BWC, call.num_real_B, self._num_before)
        _write(self.inputs_RWC, call.rows_B, _pad_to(everything_BWC, self.inputs_RWC.shape[1]))
        return out_BQ

    def _state_before(
        self,
        call: StateCall,
        inputs_BWC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        recurrence: Recurrence,
    ) -> torch.Tensor:
        """Return the rows' states before the batch, which include accepted pending tokens."""
        assert self.state is not None
        state = _zero_if(call.starts_B == 0, self.state.index_select(0, call.rows_B).float())
        if not self._num_pending:
            return state
        before_BWC, pending_BPC = inputs_BWC.split([self._num_before, self._num_pending], dim=1)
        convolved_BPC = convolve(before_BWC, pending_BPC, weight_CW, bias_C)
        gates_BPG = None if self.gates_RPG is None else self.gates_RPG.index_select(0, call.rows_B)
        return recurrence(convolved_BPC, gates_BPG, _mask_first(call.num_pending_B, self._num_pending), state)[1]


class RecurrentStates:
    """The recurrent states of all layers in a model, and the text position of each row's states."""

    def __init__(
        self, layers: Sequence[tuple[str, LayerShape]], *, num_rows: int, num_pending: int, device: torch.device
    ) -> None:
        """Allocate the states. `num_rows` includes the padding row and the rows for snapshots, which have no
        request."""
        self.by_layer = {name: LayerState(shape, num_rows, num_pending, device) for name, shape in layers}
        self._num_pending = num_pending
        self._positions_R = torch.zeros(num_rows, dtype=torch.int32, device=device)
        """The number of tokens included in the states of each row."""

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
        """Advance the positions of the rows after all layers have processed the batch."""
        positions_B = call.starts_B + call.num_real_B if call.commits else call.starts_B
        self._positions_R.index_copy_(0, call.rows_B, positions_B.int())

    def copy_rows(self, sources_N: torch.Tensor, targets_N: torch.Tensor) -> None:
        """Copy rows that have no pending tokens, because their last forward pass was a prompt chunk, or copies of
        them."""
        for layer in self.by_layer.values():
            layer.copy_rows(sources_N, targets_N)
        self._positions_R.index_copy_(0, targets_N, self._positions_R.index_select(0, sources_N))


def _zero_if(is_first_B: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Set rows at the start of their text to zero, because they still contain the data of another request."""
    return torch.where(is_first_B.view(-1, *[1] * (tensor.dim() - 1)), 0.0, tensor)


def _mask_first(num_B: torch.Tensor, width: int) -> torch.Tensor:
    """Return a mask of the first `num_B` of `width` positions, bool [B, width]."""
    return torch.arange(width, dtype=torch.int32, device=num_B.device) < num_B[:, None]


def _slice_rows(inputs_BWC: torch.Tensor, first_B: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` inputs of each row, starting at `first_B`, [B, count, C]."""
    rows, width, _ = inputs_BWC.shape
    offsets = torch.arange(count, dtype=torch.int32, device=first_B.device)
    row_B1 = torch.arange(rows, dtype=torch.int32, device=first_B.device)[:, None] * width
    index = (row_B1 + first_B[:, None] + offsets).flatten()
    return inputs_BWC.flatten(0, 1).index_select(0, index).unflatten(0, (rows, count))


def _write(tensor: torch.Tensor, rows_B: torch.Tensor, values: torch.Tensor) -> None:
    tensor.index_copy_(0, rows_B, values.to(tensor.dtype))


def _pad_to(tensor_BQC: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - tensor_BQC.shape[1]
    return torch.nn.functional.pad(tensor_BQC, (0, 0, 0, missing)) if missing else tensor_BQC

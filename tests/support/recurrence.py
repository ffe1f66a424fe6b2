"""A small recurrent layer of each kind with random weights, and its text decoded token by token."""

from functools import partial

import torch
from torch.nn import functional as F

from vllm_gaudi_spec.devices.base import DeviceBackend
from vllm_gaudi_spec.recurrent.scans import scan, scan_each
from vllm_gaudi_spec.recurrent.states import LayerShape, RecurrentStates

TAPS, HEADS, KEY, VALUE, ROWS = 4, 2, 4, 3, 3
PAD_ROW = ROWS
SLOT = PAD_ROW + 1
"""Row of a snapshot."""
CHANNELS = HEADS * (2 * KEY + VALUE)
GATED_DELTA, MAMBA_1, MAMBA_2, CONVOLUTION = "gated delta net", "Mamba 1", "Mamba 2", "short convolution"
GATES = {GATED_DELTA: 2 * HEADS, MAMBA_1: 0, MAMBA_2: 2 * HEADS, CONVOLUTION: 0}
STATES: dict[str, tuple[int, ...]] = {
    GATED_DELTA: (HEADS, KEY, VALUE),
    MAMBA_1: (CHANNELS, KEY),
    MAMBA_2: (HEADS, KEY, VALUE),
    CONVOLUTION: (),
}
KINDS = list(STATES)


def recur(
    kind: str, convolved: torch.Tensor, gates: torch.Tensor | None, is_real: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == MAMBA_1:
        return _recur_each(convolved, is_real, state)
    convolved = torch.where(is_real[..., None], F.silu(convolved), 0.0)
    query, key, value = (
        part.unflatten(-1, (HEADS, -1)) for part in convolved.split([HEADS * KEY, HEADS * KEY, HEADS * VALUE], -1)
    )
    one, other = torch.where(is_real[..., None], gates.sigmoid(), 0.0).chunk(2, -1)
    if kind == MAMBA_2:
        return scan(query, key, value * one[..., None], -one[..., None], state)
    return scan(query, F.normalize(key, dim=-1), value, -one[..., None], state, other)


def _recur_each(
    convolved: torch.Tensor, is_real: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the recurrence to gates that follow from the inputs alone."""
    value = torch.where(is_real[..., None], F.silu(convolved), 0.0)
    step = torch.where(is_real[..., None], F.softplus(convolved), 0.0)
    query, key, _ = value.split([KEY, KEY, CHANNELS - 2 * KEY], -1)
    rate = -torch.arange(1, KEY + 1, dtype=torch.float32, device=state.device).expand(CHANNELS, KEY)
    return scan_each(query, key, value, step, rate, state)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Layer:
    """The states of one layer, and the texts that it reads."""

    def __init__(self, kind: str, num_drafts: int, backend: DeviceBackend | None = None) -> None:
        """`backend`: device whose graphs read the texts; by default they are read in this process."""
        torch.manual_seed(0)
        device = backend.traits.torch_device if backend is not None else torch.device("cpu")
        self._upload = backend.memory.upload if backend is not None else _as_it_is
        self._download = backend.memory.download if backend is not None else _as_it_is
        self.num_pending = num_drafts + 1 if num_drafts else 0
        shape = LayerShape(
            num_channels=CHANNELS,
            num_taps=TAPS,
            num_gates=GATES[kind],
            state=STATES[kind],
            dtype=torch.float32,
            state_dtype=torch.float32,
        )
        self.num_gates = shape.num_gates
        self.states = RecurrentStates(
            [("layer", shape)], num_rows=SLOT + 1, num_pending=self.num_pending, device=device
        )
        self.layer = self.states.by_layer["layer"]
        self.weight, self.bias = torch.randn(CHANNELS, TAPS).to(device), torch.randn(CHANNELS).to(device)
        self.recurrence = partial(recur, kind)
        self._run = backend.graphs.graph(self._forward) if backend is not None else self._forward
        self._run_copy = backend.graphs.graph(self.states.copy_rows) if backend is not None else self.states.copy_rows

    def text(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random inputs and gates of `n` tokens."""
        return torch.randn(length, CHANNELS), torch.randn(length, self.num_gates)

    def read(
        self,
        rows: list[int],
        starts: list[int],
        texts: list[tuple[torch.Tensor, torch.Tensor]],
        num_queries: int,
        *,
        is_prompt: bool = False,
    ) -> torch.Tensor:
        """Run a forward. A row's missing tokens, up to `num_queries`, are padding full of noise."""
        inputs, gates = (
            torch.randn(len(rows), num_queries, CHANNELS),
            torch.randn(len(rows), num_queries, self.num_gates),
        )
        for row, (some, others) in enumerate(texts):
            inputs[row, : len(some)], gates[row, : len(some)] = some, others
        lengths = torch.tensor([len(some) for some, _ in texts], dtype=torch.int32)
        starts_B = torch.tensor(starts, dtype=torch.int32)
        rows_B, starts_B, lengths = map(self._upload, (torch.tensor(rows), starts_B, lengths))
        read_gates = self._upload(gates) if self.num_gates else None
        out = self._run(rows_B, starts_B, lengths, self._upload(inputs), read_gates, num_queries, is_prompt)
        return self._download(out)

    def _forward(
        self,
        rows: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        inputs: torch.Tensor,
        gates: torch.Tensor | None,
        num_queries: int,
        is_prompt: bool,
    ) -> torch.Tensor:
        call = self.states.call(rows, starts, lengths, num_queries, is_prompt=is_prompt)
        out = self.layer.follow(call, inputs, gates, self.weight, self.bias, self.recurrence)
        self.states.advance(call)
        return out

    def copy(self, source: int, target: int) -> None:
        self._run_copy(self._upload(torch.tensor([source])), self._upload(torch.tensor([target])))

    def kept(self, row: int) -> list[torch.Tensor]:
        """Return the state, and the inputs before its position."""
        inputs = self.layer.inputs_RWC[row, : TAPS - 1].clone()
        return [inputs] if self.layer.state is None else [inputs, self.layer.state[row].clone()]


def part(text: tuple[torch.Tensor, torch.Tensor], begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    return text[0][begin:end], text[1][begin:end]


def sequential(kind: str, text: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the outputs of each token, and what is kept after the last."""
    one = Layer(kind, num_drafts=0)
    outs = [one.read([0], [at], [part(text, at, at + 1)], 1)[0] for at in range(len(text[0]))]
    return torch.cat(outs), one.kept(0)

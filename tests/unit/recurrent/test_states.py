"""The state of a row whose drafts are accepted and rejected is that of its text decoded token by token."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from torch.nn import functional as F

from vllm_gaudi_spec.recurrent.scans import scan
from vllm_gaudi_spec.recurrent.states import LayerShape, RecurrentStates

TAPS, HEADS, KEY, VALUE, ROWS = 4, 2, 4, 3, 3
PAD_ROW = ROWS
CHANNELS, GATES = HEADS * (2 * KEY + VALUE), 2 * HEADS
GATED_DELTA, MAMBA_2, CONVOLUTION = "gated delta net", "Mamba 2", "short convolution"
KINDS = [GATED_DELTA, MAMBA_2, CONVOLUTION]


def recur(
    kind: str, convolved: torch.Tensor, gates: torch.Tensor, is_real: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    convolved = torch.where(is_real[..., None], F.silu(convolved), 0.0)
    query, key, value = (
        part.unflatten(-1, (HEADS, -1)) for part in convolved.split([HEADS * KEY, HEADS * KEY, HEADS * VALUE], -1)
    )
    one, other = torch.where(is_real[..., None], gates.sigmoid(), 0.0).chunk(2, -1)
    if kind == MAMBA_2:
        return scan(query, key, value * one[..., None], -one, state)
    return scan(query, F.normalize(key, dim=-1), value, -one, state, other)


class Layer:
    """One layer's states, and texts that it reads."""

    def __init__(self, kind: str, num_drafts: int) -> None:
        torch.manual_seed(0)
        has_state = kind != CONVOLUTION
        self.num_pending = num_drafts + 1 if num_drafts else 0
        shape = LayerShape(
            num_channels=CHANNELS,
            num_taps=TAPS,
            num_gates=GATES if has_state else 0,
            state=(HEADS, KEY, VALUE) if has_state else (),
            dtype=torch.float32,
            state_dtype=torch.float32,
        )
        self.num_gates = shape.num_gates
        self.states = RecurrentStates(
            [("layer", shape)], num_rows=ROWS + 1, num_pending=self.num_pending, device=torch.device("cpu")
        )
        self.layer = self.states.by_layer["layer"]
        self.weight, self.bias = torch.randn(CHANNELS, TAPS), torch.randn(CHANNELS)
        self.recurrence = partial(recur, kind)

    def text(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer gets of so many tokens: inputs and gates."""
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
        """A forward; what a row has fewer than `num_queries` is padding, full of noise."""
        inputs, gates = (
            torch.randn(len(rows), num_queries, CHANNELS),
            torch.randn(len(rows), num_queries, self.num_gates),
        )
        for row, (some, others) in enumerate(texts):
            inputs[row, : len(some)], gates[row, : len(some)] = some, others
        lengths = torch.tensor([len(some) for some, _ in texts], dtype=torch.int32)
        call = self.states.call(
            torch.tensor(rows), torch.tensor(starts, dtype=torch.int32), lengths, num_queries, is_prompt=is_prompt
        )
        out = self.layer.follow(call, inputs, gates, self.weight, self.bias, self.recurrence)
        self.states.advance(call)
        return out

    def kept(self, row: int) -> list[torch.Tensor]:
        """The state, and the inputs before its position."""
        inputs = self.layer.inputs_RWC[row, : TAPS - 1].clone()
        return [inputs] if self.layer.state is None else [inputs, self.layer.state[row].clone()]


def part(text: tuple[torch.Tensor, torch.Tensor], begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    return text[0][begin:end], text[1][begin:end]


def sequential(kind: str, text: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs of each token, and what is kept after the last."""
    one = Layer(kind, num_drafts=0)
    outs = [one.read([0], [at], [part(text, at, at + 1)], 1)[0] for at in range(len(text[0]))]
    return torch.cat(outs), one.kept(0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_every_number_of_accepted_drafts(kind: str, num_drafts: int) -> None:
    """After each, every number again: what is pending then begins at another token."""
    width = num_drafts + 1
    for first, second in product(range(1, width + 1), repeat=2):
        layer = Layer(kind, num_drafts)
        text = layer.text(5 + first + second)
        expected, kept = sequential(kind, text)
        layer.read([1], [0], [part(text, 0, 5)], 8, is_prompt=True)
        at = 5
        for accepted in (first, second):
            wrong = layer.text(width - accepted)
            right = part(text, at, at + accepted)
            guess = torch.cat((right[0], wrong[0])), torch.cat((right[1], wrong[1]))
            out = layer.read([1], [at], [guess], width)
            torch.testing.assert_close(out[0, :accepted], expected[at : at + accepted], atol=1e-5, rtol=1e-5)
            at += accepted
        # The next chunk begins where the accepted ones end, and what they left is read into the state.
        layer.read([1], [at], [layer.text(0)], 8, is_prompt=True)
        for some, others in zip(layer.kept(1), kept, strict=True):
            torch.testing.assert_close(some, others, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_drafts_among_others(kind: str) -> None:
    layer = Layer(kind, 3)
    text = layer.text(16)
    expected, _ = sequential(kind, text)
    layer.read([0], [0], [part(text, 0, 3)], 4, is_prompt=True)
    at = 3
    # Accepted tokens, queries of the rectangle, real tokens
    for accepted, width, num_real in [(2, 4, 4), (1, 1, 1), (3, 4, 3), (1, 1, 1), (1, 1, 1), (1, 4, 1), (4, 4, 4)]:
        right, wrong = part(text, at, at + accepted), layer.text(num_real - accepted)
        out = layer.read([0], [at], [(torch.cat((right[0], wrong[0])), torch.cat((right[1], wrong[1])))], width)
        torch.testing.assert_close(out[0, :accepted], expected[at : at + accepted], atol=1e-5, rtol=1e-5)
        at += accepted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_v06_a_prompt_in_chunks_beside_others(kind: str, num_drafts: int) -> None:
    """Rows of different lengths, in another order each time, with padding."""
    layer = Layer(kind, num_drafts)
    texts = [layer.text(length) for length in (90, 7, 40)]
    expected = [sequential(kind, text)[0] for text in texts]
    for begin, width in ((0, 5), (5, 2), (7, 80)):
        rows = [row for row in (2, 0, 1) if len(texts[row][0]) > begin]
        chunks = [part(texts[row], begin, begin + width) for row in rows]
        starts = [begin] * len(rows)
        out = layer.read([*rows, PAD_ROW], [*starts, 0], [*chunks, layer.text(0)], width + 3, is_prompt=True)
        for row, found, (some, _) in zip(rows, out, chunks, strict=False):
            wanted = expected[row][begin : begin + len(some)]
            torch.testing.assert_close(found[: len(some)], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_v05_padding_changes_nobodys_state(kind: str) -> None:
    layer = Layer(kind, 3)
    for row in range(ROWS):
        layer.read([row], [0], [layer.text(6)], 8, is_prompt=True)
    before = [layer.kept(row) for row in range(ROWS)]
    layer.read([PAD_ROW] * 4, [0] * 4, [layer.text(0)] * 4, 8, is_prompt=True)
    layer.read([PAD_ROW] * 4, [0] * 4, [layer.text(0)] * 4, 4)
    for row in range(ROWS):
        for some, others in zip(layer.kept(row), before[row], strict=True):
            assert torch.equal(some, others)
        assert layer.states._positions_R[row] == 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_starts_anew_with_its_next_request(kind: str) -> None:
    """Also where the last one left drafts, and where the next one has a prompt of one token."""
    layer = Layer(kind, 3)
    layer.read([0], [0], [layer.text(6)], 8, is_prompt=True)
    layer.read([0], [6], [layer.text(4)], 4)
    text = layer.text(3)
    expected, _ = sequential(kind, text)
    layer.layer.inputs_RWC[0, 1] = float("nan")  # whatever it left
    for at in range(3):
        out = layer.read([0], [at], [part(text, at, at + 1)], 1)
        torch.testing.assert_close(out[0], expected[at : at + 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [GATED_DELTA, MAMBA_2])
def test_rejected_drafts_that_are_no_numbers_spoil_nothing(kind: str) -> None:
    layer = Layer(kind, 1)
    text = layer.text(4)
    expected, _ = sequential(kind, text)
    layer.read([0], [0], [part(text, 0, 2)], 2, is_prompt=True)
    wrong = torch.full((1, CHANNELS), float("nan")), torch.full((1, GATES), float("nan"))
    layer.read([0], [2], [(torch.cat((text[0][2:3], wrong[0])), torch.cat((text[1][2:3], wrong[1])))], 2)
    out = layer.read([0], [3], [part(text, 3, 4)], 1)
    torch.testing.assert_close(out[0], expected[3:4], atol=1e-5, rtol=1e-5)


def test_memory_is_counted_as_it_is_taken() -> None:
    shape = LayerShape(CHANNELS, TAPS, GATES, (HEADS, KEY, VALUE), torch.bfloat16, torch.float32)
    states = RecurrentStates([("layer", shape)], num_rows=5, num_pending=4, device=torch.device("cpu"))
    layer = states.by_layer["layer"]
    tensors = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 3
    assert 5 * shape.num_bytes(4) == sum(tensor.numel() * tensor.itemsize for tensor in tensors)

"""The state of a row with accepted and rejected drafts equals that of its text decoded token by token."""

from random import Random

import pytest
import torch

from tests.support.recurrence import (
    CHANNELS,
    GATED_DELTA,
    GATES,
    KINDS,
    PAD_ROW,
    STATES,
    TAPS,
    Layer,
    part,
    sequential,
)
from vllm_gaudi_spec.recurrent.states import LayerShape, RecurrentStates


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_v05_rows_with_different_acceptance_in_one_batch(kind: str, num_drafts: int) -> None:
    """Prompts come in chunks between verify steps, and each rectangle has a row of padding.

    One request is preempted: its text is a prompt again, in another request's former row.
    """
    layer, random, width = Layer(kind, num_drafts), Random(num_drafts), num_drafts + 1
    texts = [layer.text(length) for length in (48, 40, 44)]
    expected = [sequential(kind, text) for text in texts]
    prompts, rows, at = [9, 14, 3], [0, 1, 2], [0, 0, 0]

    def read(requests: list[int], counts: list[int], guessed: int, columns: int, *, is_prompt: bool) -> None:
        """`guessed` are tokens of a row; those after its count are wrong."""
        some = [part(texts[one], at[one], at[one] + count) for one, count in zip(requests, counts, strict=True)]
        noise = [layer.text(max(guessed - count, 0)) for count in counts]
        both = [(torch.cat((a, c)), torch.cat((b, d))) for (a, b), (c, d) in zip(some, noise, strict=True)]
        out = layer.read(
            [*(rows[one] for one in requests), PAD_ROW],
            [*(at[one] for one in requests), 0],
            [*both, layer.text(0)],
            columns,
            is_prompt=is_prompt,
        )
        for one, count, found in zip(requests, counts, out, strict=False):
            wanted = expected[one][0][at[one] : at[one] + count]
            torch.testing.assert_close(found[:count], wanted, atol=1e-5, rtol=1e-5)
            at[one] += count

    for step in range(60):
        if step == 12:
            rows[0], rows[2] = rows[2], rows[0]
            prompts[0], prompts[2], at[0], at[2] = at[0], at[2], 0, 0
        if chunks := [one for one in range(3) if at[one] < prompts[one]]:
            one = random.choice(chunks)
            read([one], [min(4, prompts[one] - at[one])], 0, 4, is_prompt=True)
        decoding = [one for one in range(3) if prompts[one] <= at[one] < len(texts[one][0])]
        random.shuffle(decoding)
        counts = [min(random.randint(1, width), len(texts[one][0]) - at[one]) for one in decoding]
        read(decoding, counts, width, width, is_prompt=False)
    for one in range(3):
        assert at[one] == len(texts[one][0])
        layer.read([rows[one]], [at[one]], [layer.text(0)], 4, is_prompt=True)
        for found, wanted in zip(layer.kept(rows[one]), expected[one][1], strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_next_request_of_a_row_starts_with_a_zero_state(kind: str) -> None:
    """Even if the last request left drafts, and if the next one has a prompt of one token."""
    layer = Layer(kind, 3)
    layer.read([0], [0], [layer.text(6)], 8, is_prompt=True)
    layer.read([0], [6], [layer.text(4)], 4)
    text = layer.text(3)
    expected, _ = sequential(kind, text)
    layer.layer.inputs_RWC[0, 1] = float("nan")  # left by the last request
    for at in range(3):
        out = layer.read([0], [at], [part(text, at, at + 1)], 1)
        torch.testing.assert_close(out[0], expected[at : at + 1], atol=1e-5, rtol=1e-5)


def test_planned_memory_equals_allocated_memory() -> None:
    shape = LayerShape(CHANNELS, TAPS, GATES[GATED_DELTA], STATES[GATED_DELTA], torch.bfloat16, torch.float32)
    states = RecurrentStates([("layer", shape)], num_rows=5, num_pending=4, device=torch.device("cpu"))
    layer = states.by_layer["layer"]
    tensors = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 3
    assert 5 * shape.num_bytes(4) == sum(tensor.numel() * tensor.itemsize for tensor in tensors)

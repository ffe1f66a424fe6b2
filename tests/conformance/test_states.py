"""Recurrent states in graphs: what was accepted in one step is known to the next on the device alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.conformance.graphs import compiled
from tests.support.recurrence import KINDS, PAD_ROW, Layer, part, sequential

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend


@pytest.mark.parametrize("rejected", [1.0, torch.nan])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_and_verify_steps(kind: str, rejected: float, backend: DeviceBackend) -> None:
    """Two graphs, whatever was accepted. `rejected`: what drafts are multiplied by that are not."""
    layer, num_drafts = Layer(kind, 3, backend), 3
    text = layer.text(50)
    expected, _ = sequential(kind, text)
    made, at = 0, 0

    def read(count: int, width: int, wrong: int, *, is_prompt: bool) -> None:
        right, noise = part(text, at, at + count), layer.text(wrong)
        both = torch.cat((right[0], noise[0] * rejected)), torch.cat((right[1], noise[1] * rejected))
        out = layer.read([1, PAD_ROW], [at, 0], [both, layer.text(0)], width, is_prompt=is_prompt)
        torch.testing.assert_close(out[0, :count], expected[at : at + count], atol=1e-5, rtol=1e-5)

    for count in (8, 5):
        read(count, 8, 0, is_prompt=True)
        at += count
    for count in (2, 4, 1, 3, 4, 4, 1, 1, 4):
        read(count, num_drafts + 1, num_drafts + 1 - count, is_prompt=False)
        at += count
        made = made or compiled(backend)
    assert compiled(backend) == made

"""Recurrent states in graphs: what was accepted in one step is known to the next on the device alone."""

import pytest
import torch

from tests.conformance.graphs import compiled
from tests.support.recurrence import KINDS, PAD_ROW, SLOT, Layer, part, sequential
from vllm_gaudi_spec.devices.base import DeviceBackend
from vllm_gaudi_spec.recurrent.layers import _normalize


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


@pytest.mark.parametrize("kind", KINDS)
def test_snapshots(kind: str, backend: DeviceBackend) -> None:
    """One graph for a copy to a slot and back, whatever the rows are."""
    layer = Layer(kind, 3, backend)
    text, other = layer.text(20), layer.text(20)
    expected, _ = sequential(kind, text)
    layer.read([0], [0], [part(text, 0, 8)], 8, is_prompt=True)
    layer.copy(0, SLOT)
    made = compiled(backend)
    for row in (1, 2):
        layer.read([row], [0], [part(other, 0, 6)], 8, is_prompt=True)
        layer.copy(SLOT, row)
        out = layer.read([row], [8], [part(text, 8, 14)], 8, is_prompt=True)
        torch.testing.assert_close(out[0, :6], expected[8:14], atol=1e-5, rtol=1e-5)
    assert compiled(backend) == made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries", [1, 4, 128])
def test_c34_queries_and_keys_get_the_length_one(queries: int, dtype: torch.dtype, backend: DeviceBackend) -> None:
    numbers = torch.randn(2, queries, 4, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = backend.graphs.graph(_normalize)(backend.memory.upload(numbers))
    expected = numbers.double() / (numbers.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    error = (backend.memory.download(found).double() - expected).abs().max().item()
    assert error < (1e-6 if dtype is torch.float32 else 4e-3)

"""Rotary embeddings on the CPU, for queries in every shape that vLLM's models pass."""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

if current_platform.device_type != "cpu":
    pytest.skip("the layers of one device only can be registered in a process", allow_module_level=True)

from vllm_gaudi_spec.devices.cpu import layers  # noqa: F401  (registers it)

TOKENS, HEADS, KV_HEADS, SIZE = 7, 4, 2, 16


def heads_of(form: str, num_heads: int) -> torch.Tensor:
    torch.manual_seed(num_heads)
    rows = torch.randn(TOKENS, num_heads * SIZE + 8)[:, : num_heads * SIZE]  # a slice of a projection's result
    if form == "side by side":
        return rows
    if form == "apart":
        return rows.unflatten(1, (num_heads, SIZE))
    return torch.randn(TOKENS, num_heads, SIZE + 4)[..., 4:]


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("form", ["side by side", "apart", "parts of heads"])
def test_heads_rotate_by_their_tokens_position(form: str, is_neox_style: bool) -> None:
    with set_current_vllm_config(VllmConfig()):
        layer = RotaryEmbedding(SIZE, SIZE, 64, 10_000.0, is_neox_style, torch.float32)
    positions = torch.arange(TOKENS) + 20
    query, key = heads_of(form, HEADS), heads_of(form, KV_HEADS)
    expected = layer.forward_native(positions, query.clone(), key.clone())
    for found, wanted in zip(layer.forward_cpu(positions, query, key), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    alone, none = layer.forward_cpu(positions, heads_of(form, HEADS), None)
    torch.testing.assert_close(alone, expected[0])
    assert none is None

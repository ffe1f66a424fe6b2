"""Tables of rotary embeddings are looked up once per forward, for all layers that share them."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

from tests.support.attention_layers import call
from vllm_gaudi_spec.devices.common import layers

HEAD, LENGTH = 8, 64


@pytest.fixture
def config() -> Iterator[VllmConfig]:
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


@pytest.fixture(params=[True, False], ids=["halves", "pairs"])
def halves(request: Any) -> bool:
    return cast(bool, request.param)


@pytest.fixture
def given() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return []


@pytest.fixture
def turning(given: list[Any]) -> type:
    def turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, halves: bool) -> torch.Tensor:
        given.append((cos, sin))
        if halves:
            turned = torch.cat((-heads[..., HEAD // 2 :], heads[..., : HEAD // 2]), -1)
        else:
            turned = torch.stack((-heads[..., 1::2], heads[..., ::2]), -1).flatten(-2)
        return heads * cos + turned * sin

    return layers._make_rotary_mixin(turn)


@pytest.fixture
def rotary(config: VllmConfig, halves: bool, turning: type) -> Any:
    cls = type("Rotary", (turning, RotaryEmbedding), {})
    return cls(HEAD, HEAD, LENGTH, 10000.0, halves, torch.float32)


def turned(rotary: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    query, key = torch.randn(3, 2 * HEAD), torch.randn(3, HEAD)
    found = rotary.forward_oot(positions, query, key)
    expected = rotary.forward_native(positions, query.clone(), key.clone())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    return cast(tuple[torch.Tensor, torch.Tensor], found)


def test_layers_of_a_forward_share_tables(rotary: Any, given: list[Any], config: VllmConfig) -> None:
    positions = torch.tensor([3, 9, 0])
    with set_forward_context({"layer": call([0], [[0]], 3)}, config, 3):
        turned(rotary, positions)
        turned(rotary, positions)
    assert len({id(cos) for cos, _ in given}) == len({id(sin) for _, sin in given}) == 1
    assert len(given) == 4


def test_other_positions_have_other_tables(rotary: Any, config: VllmConfig) -> None:
    """Even if they reuse the memory of earlier positions."""
    with set_forward_context({"layer": call([0], [[0]], 3)}, config, 3):
        for start in range(20):
            turned(rotary, torch.arange(start, start + 3))


def test_next_forward_has_other_tables(rotary: Any, config: VllmConfig) -> None:
    """A buffer may hold other positions by then."""
    positions = torch.tensor([3, 9, 0])
    for _ in range(3):
        with set_forward_context({"layer": call([0], [[0]], 3)}, config, 3):
            turned(rotary, positions)
        positions += 5


@pytest.mark.parametrize("sections", [[1, 2, 1], [2, 1, 1]])
@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_of_several_dimensions(
    config: VllmConfig, halves: bool, turning: type, sections: list[int], interleaved: bool
) -> None:
    """Each channel rotates by the dimension of its section; text has one position for all dimensions."""
    cls = type("Rotary", (turning, MRotaryEmbedding), {})
    rotary = cls(HEAD, HEAD, LENGTH, 10000.0, halves, torch.float32, sections, interleaved)
    turned(rotary, torch.tensor([[3, 9, 0], [5, 1, 2], [7, 7, 60]]))
    turned(rotary, torch.tensor([3, 9, 0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "Llama 3.1"])
def test_tables_of_long_contexts_are_computed_in_float32(
    config: VllmConfig, turning: type, scaled: bool, dtype: torch.dtype
) -> None:
    """A model is built with its own dtype as torch's default; bfloat16 angles would be whole turns off at 131,071.

    What is left is the rounding of float32 angles, and of bfloat16 results, as in vLLM on other devices."""
    length, size, base = 131072, 128, 500000.0
    cls: Any = type("Rotary", (turning, Llama3RotaryEmbedding if scaled else RotaryEmbedding), {})
    options = (8.0, 1.0, 4.0, 8192) if scaled else ()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        rotary = cls(size, size, length, base, True, dtype, *options)
    finally:
        torch.set_default_dtype(before)
    positions = torch.tensor([0, 4096, 65537, length - 1])
    cos, sin = layers._look_up_tables(rotary, positions, torch.zeros(1, dtype=dtype))
    inverse = base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    if scaled:
        turns = 8192 * inverse / (2 * torch.pi)
        smooth = ((turns - 1) / 3).clamp(0, 1)
        inverse = smooth * inverse + (1 - smooth) * inverse / 8
    angles = positions.double()[:, None, None] * torch.cat((inverse, inverse))
    rounding = 2**-9 if dtype is torch.bfloat16 else 0
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=rounding + length * 2**-23)
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=rounding + length * 2**-23)

"""KV in FP8: what is written, what is read, and that a verify step and plain steps are the same bits."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.attention_layers import call
from tests.support.attention_layers import layer as attention_layer
from tests.support.reference.attention import attend_row
from tests.support.reference.e4m3 import nearest
from vllm_gaudi_spec.attention import torch_ops
from vllm_gaudi_spec.attention.backend import RectangleAttentionImpl
from vllm_gaudi_spec.attention.metadata import AttentionLayerSpec
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.quantization import models
from vllm_gaudi_spec.quantization.fp8 import Arithmetic, HostArithmetic
from vllm_gaudi_spec.quantization.layers import KV_DTYPE, Fp8Cache

HEADS, KV_HEADS, SIZE, BLOCK, NUM_BLOCKS = 6, 2, 64, 16, 8
QUERIES = 5
SCALES = torch.tensor(0.025), torch.tensor(0.017)
BY_HEAD = torch.tensor([[0.025], [0.05]]), torch.tensor([[0.017], [0.03]])
HOST = HostArithmetic(448.0)
SPEC = attention_layer(num_heads=HEADS, dtype=torch.float32, block_size=BLOCK, kv_dtype=KV_DTYPE)
START = 2 * BLOCK + BLOCK - 2
"""Tokens before the step, whose last queries are in another block than its first ones."""
TABLE = [3, 1, 6, 2, 0, 0]


def impl_with(arithmetic: Arithmetic, scales: tuple[torch.Tensor, torch.Tensor] = SCALES) -> RectangleAttentionImpl:
    impl = RectangleAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, "fp8_e4m3")
    k_cache, v_cache = (Fp8Cache(scale, arithmetic, impl.dtype) for scale in scales)
    impl.quantize_kv(KV_DTYPE, k_cache, v_cache, arithmetic.matmul)
    return impl


def with_operations(impl: RectangleAttentionImpl) -> AttentionLayerSpec:
    return replace(SPEC, operations=impl)


def numbers(count: int, heads: int, seed: int) -> torch.Tensor:
    return torch.randn(count, heads, SIZE, generator=torch.Generator().manual_seed(seed)) * 2


KEYS, VALUES = numbers(START + QUERIES, KV_HEADS, 0), numbers(START + QUERIES, KV_HEADS, 1)
QUERY = numbers(QUERIES, HEADS, 2)


def slots(positions: range) -> torch.Tensor:
    return torch.tensor([TABLE[p // BLOCK] * BLOCK + p % BLOCK for p in positions])


def stored(cache: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] = SCALES) -> None:
    keys, values = KEYS[:START], VALUES[:START]
    torch_ops.write_kv(keys, values, cache, slots(range(START)), with_operations(impl_with(HOST, scales)))


def empty() -> torch.Tensor:
    return torch.zeros(NUM_BLOCKS, KV_HEADS, BLOCK, 2 * SIZE, dtype=KV_DTYPE)


def expected(
    scales: tuple[torch.Tensor, torch.Tensor] = SCALES, rounded: bool = True, largest: float = 448.0
) -> torch.Tensor:
    """float64, of keys and values out of the table of all e4m3 numbers, or as they are."""
    keys, values = (
        nearest(x / scale, largest) * scale.double() if rounded else x.double()
        for x, scale in zip((KEYS, VALUES), scales, strict=True)
    )
    padding = torch.zeros(4 * BLOCK - len(keys), KV_HEADS, SIZE, dtype=torch.float64)
    blocks = (torch.cat((part, padding)).unflatten(0, (4, BLOCK)) for part in (keys, values))
    places = {place: place for place in range(4)}
    return attend_row(QUERY.double(), *blocks, places, START, SPEC)


@pytest.mark.parametrize("scales", [SCALES, BY_HEAD], ids=["per tensor", "per head"])
def test_read_values_are_e4m3_numbers(scales: tuple[torch.Tensor, torch.Tensor]) -> None:
    cache, impl = empty(), impl_with(HOST, scales)
    stored(cache, scales)
    positions = range(START, START + QUERIES)
    torch_ops.write_kv(KEYS[START:], VALUES[START:], cache, slots(positions), with_operations(impl))
    found = torch_ops.attend(QUERY, cache, call([START], [TABLE], QUERIES), with_operations(impl))
    torch.testing.assert_close(found.double(), expected(scales), rtol=0.0, atol=1e-5)
    # Three bits of 64 numbers a key: scores of size 4 move by 0.2, and values by a sixteenth at most.
    error = (found.double() - expected(rounded=False)).abs()
    assert 0.001 < error.mean() < 0.06
    assert error.max() < 0.7


def test_verify_step_has_the_bits_of_decodes() -> None:
    together, apart, impl = empty(), empty(), impl_with(HOST)
    for cache in (together, apart):
        stored(cache)
    positions = range(START, START + QUERIES)
    torch_ops.write_kv(KEYS[START:], VALUES[START:], together, slots(positions), with_operations(impl))
    verified = torch_ops.attend(QUERY, together, call([START], [TABLE], QUERIES), with_operations(impl))
    for index, position in enumerate(positions):
        key, value = (x[position : position + 1] for x in (KEYS, VALUES))
        torch_ops.write_kv(key, value, apart, slots(range(position, position + 1)), with_operations(impl))
        plain = torch_ops.attend(QUERY[index : index + 1], apart, call([position], [TABLE]), with_operations(impl))
        assert torch.equal(plain[0], verified[index])
    assert torch.equal(together.view(torch.uint8), apart.view(torch.uint8))


def test_large_values_are_clamped_and_nan_stays_in_its_slot() -> None:
    cache, impl = empty(), impl_with(HOST)
    bad = torch.full((2, KV_HEADS, SIZE), torch.nan)
    bad[0] = torch.inf
    torch_ops.write_kv(bad, bad, cache, torch.tensor([BLOCK, 2 * BLOCK]), with_operations(impl))
    read = impl.k_cache.fetch_from_cache(torch_ops.split_kv(cache)[0], torch.arange(NUM_BLOCKS))
    assert (read[1, :, 0] == 448 * SCALES[0]).all()
    assert read[2, :, 0].isnan().all()
    read[2, :, 0] = 0
    assert read.isfinite().all()


def layer(k_scale: Any = 1.0, v_scale: Any = 1.0, owner: str | None = None) -> Any:
    impl = RectangleAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, "fp8_e4m3")
    return SimpleNamespace(
        impl=impl, _k_scale=torch.tensor(k_scale), _v_scale=torch.tensor(v_scale), kv_sharing_target_layer_name=owner
    )


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(models.logger, "warning", lambda text, *values: lines.append(text % values))
    return lines


def quantize(
    monkeypatch: pytest.MonkeyPatch, *layers: Any, cache_dtype: str = "fp8_e4m3", fp8_range: str | None = None
) -> None:
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=cache_dtype), additional_config={})
    monkeypatch.setattr(models, "suggest_model_dtype", lambda _: "leave it out")
    backend: Any = SimpleNamespace(weights=SimpleNamespace(fp8_arithmetic=HostArithmetic, fp8_range=fp8_range))
    by_name = {f"layers.{number}": one for number, one in enumerate(layers)}
    monkeypatch.setattr(models, "get_layers_from_vllm_config", lambda *_: by_name)
    models.quantize_kv(config, backend, "a model", others=())


def test_scales_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch, warned: list[str]) -> None:
    one, by_head = layer(0.5, 0.25), layer([0.5, 0.25], [2.0, 4.0])
    quantize(monkeypatch, one, by_head)
    assert one.impl.kv_dtype is KV_DTYPE
    assert (one.impl.k_cache.input.scale, one.impl.v_cache.input.scale) == (0.5, 0.25)
    assert by_head.impl.v_cache.input.scale.tolist() == [[2.0], [4.0]]
    assert not warned


def test_shared_kv_is_read_with_its_owners_scales(monkeypatch: pytest.MonkeyPatch, warned: list[str]) -> None:
    first, reader = layer(0.5, 0.25), layer(owner="layers.0")
    quantize(monkeypatch, first, reader)
    assert (reader.impl.k_cache.input.scale, reader.impl.v_cache.input.scale) == (0.5, 0.25)
    assert not warned


def test_gaudi_2_doubles_scales(monkeypatch: pytest.MonkeyPatch, warned: list[str]) -> None:
    """Twice 240 holds what 448 does, in the same bits but for small numbers, of which it loses one."""
    one = layer(0.5, 0.25)
    quantize(monkeypatch, one, fp8_range="gaudi2")
    assert one.impl.k_cache.input.scale == 1.0
    assert not warned

    def on_gaudi2(keys: torch.Tensor) -> torch.Tensor:
        return one.impl.k_cache.input.back(one.impl.k_cache.input(keys), torch.float32)

    def on_gaudi3(keys: torch.Tensor) -> torch.Tensor:
        return (nearest(keys / 0.5, 448.0) * 0.5).float()

    keys = 2 ** torch.linspace(-5, 8.7, 1000) * 0.5
    assert torch.equal(on_gaudi2(keys), on_gaudi3(keys))
    small = 2 ** torch.linspace(-9, -5.1, 1000) * 0.5
    assert not torch.equal(on_gaudi2(small), on_gaudi3(small))
    # Two of its steps, of 2**-10 each, and half of one.
    assert (on_gaudi2(small) - small).abs().max() <= 2.0**-10 < (on_gaudi2(small) - small).abs().max() * 1.1
    assert (on_gaudi3(small) - small).abs().max() <= 2.0**-11


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["k_scale", "v_scale"])
def test_bad_scale_is_refused(which: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UnsupportedConfigError, match=rf"^{which} of layers\.0 is {value:g}, but a scale must be above 0"
    ):
        quantize(monkeypatch, layer(**{which: value}))

"""Binding of KV caches: layers, caches and kernels must agree, and layers that share KV read their owner's."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention

from vllm_gaudi_spec.devices.cpu import backend as cpu
from vllm_gaudi_spec.model import LoadedModel
from vllm_gaudi_spec.platforms.attention import RectangleAttentionBackend

BLOCKS, BLOCK, HEADS, SIZE = 3, 32, 2, 32
OWNER, READER = "layers.0.attn", "layers.2.attn"


@pytest.fixture
def config() -> Iterator[VllmConfig]:
    made = VllmConfig()
    with set_current_vllm_config(made):
        yield made


def layer(name: str = OWNER, **options: Any) -> Any:
    given = dict(num_kv_heads=HEADS, prefix=name, attn_backend=RectangleAttentionBackend)
    return Attention(4, SIZE, SIZE**-0.5, **(given | options))


def cache(dtype: torch.dtype = torch.float32, *, heads: int = HEADS, size: int = SIZE) -> torch.Tensor:
    return torch.zeros(BLOCKS, heads, BLOCK, 2 * size, dtype=dtype)


def loaded(layers: list[Any]) -> Any:
    model: Any = LoadedModel.__new__(LoadedModel)
    model._layers = {one.layer_name: one for one in layers}
    model._encoding = {}
    model._backend = cpu.make_backend()
    model.vllm_config = get_current_vllm_config()
    model._kv_owners = {one.layer_name: one.kv_sharing_target_layer_name or one.layer_name for one in layers}
    return model


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (cache(torch.uint8), r"torch.uint8\), but its kernel needs .*torch.float32"),
        (cache(torch.bfloat16), r"torch.bfloat16\), but its kernel needs .*torch.float32"),
        (cache(heads=1), "heads=1, row_size=64.* needs .*heads=2, row_size=64"),
        (cache(size=64), "heads=2, row_size=128.* needs .*heads=2, row_size=64"),
    ],
    ids=["bytes", "half as wide", "heads", "head size"],
)
def test_kv_cache_of_the_wrong_shape_or_dtype_is_not_bound(wrong: torch.Tensor, words: str, config: VllmConfig) -> None:
    """vLLM resolves the dtype of some caches while it builds layers. A float32 kernel once wrote past the end of such a
    cache."""
    with pytest.raises(RuntimeError, match=f"KV cache of {OWNER} is .*{words}") as refused:
        loaded([layer()]).bind_kv({OWNER: wrong}, [[OWNER]])
    assert len(str(refused.value).splitlines()) == 1


def test_layer_sharing_kv_joins_the_group_of_its_owner(config: VllmConfig) -> None:
    owner, other = layer(), layer("layers.1.attn", per_layer_sliding_window=64)
    reader = layer(READER, kv_sharing_target_layer_name=OWNER)
    model = loaded([owner, other, reader])
    model.vllm_config = config
    assert list(model.kv_cache_spec()) == [OWNER, "layers.1.attn"]
    caches = {OWNER: cache(), "layers.1.attn": cache()}
    model.bind_kv(caches, [["layers.1.attn"], [OWNER]])
    assert reader.kv_cache is caches[OWNER]
    assert model._groups == [["layers.1.attn"], [OWNER, READER]]


def test_layers_with_different_windows_cannot_share_kv(config: VllmConfig) -> None:
    """vLLM reuses blocks outside a window."""
    owner = layer(per_layer_sliding_window=64)
    reader = layer(READER, kv_sharing_target_layer_name=OWNER)
    with pytest.raises(RuntimeError, match=f"{READER} reads the KV of {OWNER}, which has a different window"):
        loaded([owner, reader]).bind_kv({OWNER: cache()}, [[OWNER]])


def test_unwritten_kv_is_an_error_after_warm_up(config: VllmConfig) -> None:
    owner, reader = layer(), layer(READER, kv_sharing_target_layer_name=OWNER)
    model = loaded([owner, reader])
    model.bind_kv({OWNER: cache()}, [[OWNER]])
    with pytest.raises(RuntimeError, match=f"Warm-up wrote no KV for {OWNER}, which attention reads"):
        model.check_kv_is_written()
    key = torch.zeros(1, HEADS, SIZE)
    owner.impl.do_kv_cache_update(SimpleNamespace(), key, key, owner.kv_cache, torch.zeros(1, dtype=torch.int64))
    model.check_kv_is_written()


def test_chunked_attention_layers_report_their_chunk(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM derives the backend of these layers from ours, and stores the chunk nowhere else."""
    monkeypatch.setattr(
        "vllm.model_executor.layers.attention.chunked_local_attention.get_attn_backend",
        lambda *_: RectangleAttentionBackend,
    )
    chunked = ChunkedLocalAttention(4, SIZE, 1.0, 48, num_kv_heads=HEADS, prefix=OWNER)
    loaded([chunked]).bind_kv({OWNER: cache()}, [[OWNER]])
    assert chunked.impl.spec.attention_chunk == 48
    with pytest.raises(RuntimeError, match="does not use metadata builders"):
        chunked.get_attn_backend().get_builder_cls()(None, [], config, torch.device("cpu"))

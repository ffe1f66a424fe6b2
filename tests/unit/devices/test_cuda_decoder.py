"""Fused decoder layers return what the forwards of their classes return.

Run on a GPU, or without one with TRITON_INTERPRET=1.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP
from vllm.model_executor.models.qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP
from vllm.model_executor.models.qwen3 import Qwen3Attention

from tests.support.attention_layers import call
from tests.support.attention_layers import layer as attention_layer
from vllm_gaudi_spec.attention.metadata import AttentionCall
from vllm_gaudi_spec.devices.common.kv_pair import KVPair

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, HEADS, SIZE = 96, 6, 16


@pytest.fixture(scope="module", autouse=True)
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        init_distributed_environment(1, 0, f"file://{store}", local_rank=0, backend="gloo")
        initialize_model_parallel()
        yield
    cleanup_dist_env_and_memory()


def without_making(cls: type[nn.Module]) -> Any:
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    return module


def make_layer(layer_class: type[nn.Module], attention_class: type[nn.Module], mlp_class: type[nn.Module]) -> Any:
    """Make a layer whose attention returns the queries without rotating them."""
    layer, attention = without_making(layer_class), without_making(attention_class)
    attention.qkv_proj = QKVParallelLinear(HIDDEN, SIZE, HEADS, 2, bias=attention_class is Qwen2Attention)
    attention.o_proj = RowParallelLinear(HEADS * SIZE, HIDDEN, bias=False)
    attention.q_size, attention.kv_size, attention.qk_norm = HEADS * SIZE, 2 * SIZE, False
    attention.rotary_emb = lambda positions, query, key: (query, key)
    attention.attn = lambda query, key, value: query.contiguous()
    layer.self_attn, layer.mlp = attention, mlp_class(HIDDEN, 160, "silu")
    layer.input_layernorm, layer.post_attention_layernorm = RMSNorm(HIDDEN), RMSNorm(HIDDEN)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    return layer.to(DEVICE)


@torch.inference_mode()
@pytest.mark.parametrize(
    "classes", [(LlamaDecoderLayer, LlamaAttention, LlamaMLP), (Qwen2DecoderLayer, Qwen2Attention, Qwen2MLP)]
)
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("is_first", [True, False])
def test_fused_layer_equals_its_class(classes: Any, rows: int, is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_gaudi_spec.devices.cuda import decoder, linear

    layer = make_layer(*classes)
    linear.install(layer)
    hidden = torch.randn(rows, HIDDEN, device=DEVICE)
    residual = None if is_first else torch.randn(rows, HIDDEN, device=DEVICE)
    positions = torch.arange(rows, device=DEVICE)

    def run() -> Any:
        return layer(positions, hidden.clone(), None if residual is None else residual.clone())

    expected = run()
    decoder.install(layer)
    called: list[str] = []
    multiply_few_rows = linear.multiply_few_rows
    monkeypatch.setattr(
        linear,
        "multiply_few_rows",
        lambda x, *args, **named: called.append(type(x).__name__) or multiply_few_rows(x, *args, **named),
    )
    for found, wanted in zip(run(), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert called.count("Unnormed") == (2 if rows <= linear.FEW_ROWS else 0)


class AttentionLayer(nn.Module):
    """A stand-in for vLLM's attention layer: it writes KV, then attends."""

    layer_name = "layer"

    def __init__(self, call: AttentionCall, slots_T: torch.Tensor, owner: str | None) -> None:
        super().__init__()
        spec = attention_layer(num_heads=HEADS, head_size=SIZE, scale=0.25, dtype=torch.float32, block_size=16)
        self.impl = SimpleNamespace(kv_sharing_target_layer_name=owner, spec=spec, has_written=False)
        self.kv_cache = KVPair(*torch.randn(2, 112, 2, SIZE, device=DEVICE).unbind(0), 16)
        self.call, self.slots_T = call, slots_T
        self.calls = 0

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        from vllm_gaudi_spec.devices.cuda import attention

        self.calls += 1
        query, key, value = (states.unflatten(-1, (-1, SIZE)) for states in (query, key, value))
        attention.write_kv(key, value, self.kv_cache, self.slots_T)
        return attention.attend(query, self.kv_cache, self.call, self.impl.spec).flatten(1)


@torch.inference_mode()
@pytest.mark.parametrize("attention_class", [LlamaAttention, Qwen2Attention, Qwen3Attention])
@pytest.mark.parametrize(("queries", "owner"), [(1, None), (4, None), (1, "other"), (40, None)])
def test_attention(
    attention_class: type[nn.Module], queries: int, owner: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the kernel supports a call, the attention layer is not called, and KV is written all the same."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from vllm_gaudi_spec.devices.cuda import decoder, linear
    from vllm_gaudi_spec.devices.cuda.layers import RotatesInPlace

    class Rotary(RotatesInPlace, RotaryEmbedding):
        def forward(self, *args: Any) -> Any:
            return self.forward_oot(*args)

    rows = 1 if queries > 16 else 2
    asked = call([3, 18][:rows], [[1, 4, 3], [2, 5, 6]][:rows], queries, device=DEVICE.type)
    positions_BQ = asked.starts_B[:, None].long() + torch.arange(queries, device=DEVICE)
    slots_T = (asked.block_table_BW.gather(1, positions_BQ // 16).long() * 16 + positions_BQ % 16).flatten()
    attention = make_layer(LlamaDecoderLayer, attention_class, LlamaMLP).self_attn
    attention.rotary_emb = Rotary(SIZE, SIZE, 64, 10000.0, True, torch.float32).to(DEVICE)
    attention.head_dim, attention.num_heads, attention.num_kv_heads = SIZE, HEADS, 2
    if attention_class is Qwen3Attention:
        attention.q_norm, attention.k_norm = RMSNorm(SIZE).to(DEVICE), RMSNorm(SIZE).to(DEVICE)
        attention.q_norm.weight.data.normal_()
    attention.attn = layer = AttentionLayer(asked, slots_T, owner)
    context = SimpleNamespace(attn_metadata={"layer": asked}, slot_mapping={"layer": slots_T})
    monkeypatch.setattr(decoder, "get_forward_context", lambda: context)
    hidden = torch.randn(len(slots_T), HIDDEN, device=DEVICE)
    before = [stored.clone() for stored in layer.kv_cache.tensors()]

    linear.install(attention)
    expected = attention(positions=positions_BQ.flatten(), hidden_states=hidden)
    written = [stored.clone() for stored in layer.kv_cache.tensors()]
    for stored, one in zip(layer.kv_cache.tensors(), before, strict=True):
        stored.copy_(one)
    decoder.install(attention)
    found = attention(positions=positions_BQ.flatten(), hidden_states=hidden)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    for stored, wanted in zip(layer.kv_cache.tensors(), written, strict=True):
        torch.testing.assert_close(stored, wanted, atol=1e-5, rtol=1e-4)
    is_fused = owner is None and queries <= 16
    assert layer.calls == (1 if is_fused else 2)
    assert layer.impl.has_written == is_fused

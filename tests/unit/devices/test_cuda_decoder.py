"""Decoder layers with their norms and gates within linear layers give what their classes' own forward gives.

On a GPU, and without one where TRITON_INTERPRET=1 has Triton play it.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from vllm.utils.network_utils import get_distributed_init_method, get_open_port

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, HEADS, SIZE = 96, 6, 16


@pytest.fixture(scope="module", autouse=True)
def config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        init_distributed_environment(
            1, 0, get_distributed_init_method("127.0.0.1", get_open_port()), local_rank=0, backend="gloo"
        )
        initialize_model_parallel()
        yield
    cleanup_dist_env_and_memory()


def without_making(cls: type[nn.Module]) -> Any:
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    return module


def make_layer(layer_class: type[nn.Module], attention_class: type[nn.Module], mlp_class: type[nn.Module]) -> Any:
    """Its attention gives back the queries, and turns nothing."""
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
def test_a_layer(classes: Any, rows: int, is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_gaudi_spec.devices.cuda import decoder, linear

    layer = make_layer(*classes)
    linear.use_in(layer)
    hidden = torch.randn(rows, HIDDEN, device=DEVICE)
    residual = None if is_first else torch.randn(rows, HIDDEN, device=DEVICE)
    positions = torch.arange(rows, device=DEVICE)

    def run() -> Any:
        return layer(positions, hidden.clone(), None if residual is None else residual.clone())

    expected = run()
    decoder.use_in(layer)
    called: list[str] = []
    few_rows = linear.few_rows
    monkeypatch.setattr(
        linear, "few_rows", lambda x, *args, **named: called.append(type(x).__name__) or few_rows(x, *args, **named)
    )
    for found, wanted in zip(run(), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert called.count("Unnormed") == (2 if rows <= linear.FEW_ROWS else 0)

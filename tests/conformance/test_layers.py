"""Norms, rotary embedding, activation and logits as a model on this platform has them, against vLLM's plain ones."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tests.conformance.fused import Called, of_layer
from vllm_gaudi_spec.devices.base import DeviceBackend

CLOSE = dict(atol=1e-5, rtol=1e-5)


@pytest.fixture(autouse=True)
def as_in_a_model(backend: DeviceBackend) -> Iterator[None]:
    from vllm import ir
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform

    config = VllmConfig()
    priority = current_platform.get_default_ir_op_priority(config)
    # The last as workers do where vLLM compiles nothing.
    with set_current_vllm_config(config), priority.set_priority(), ir.enable_torch_wrap(False):
        yield


def test_norms(backend: DeviceBackend) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    layer = RMSNorm(48, eps=1e-5)
    weight = layer.weight.data.normal_().clone()
    x, residual = torch.randn(5, 48), torch.randn(5, 48)

    def expected(x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    layer.to(backend.traits.torch_device)
    norm, added = backend.graphs.graph(lambda x: layer(x)), backend.graphs.graph(lambda x, residual: layer(x, residual))
    upload, download = backend.memory.upload, backend.memory.download
    with Called() as called:
        torch.testing.assert_close(download(norm(upload(x.clone()))), expected(x), **CLOSE)
    assert called.names == of_layer(backend, "norm")
    with Called() as called:
        both = added(upload(x.clone()), upload(residual.clone()))
    assert called.names == of_layer(backend, "added norm")
    for one, other in zip(both, (expected(x + residual), x + residual), strict=True):
        torch.testing.assert_close(download(one), other, **CLOSE)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_rotary_embedding(backend: DeviceBackend, neox: bool, rotary_dim: int) -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    layer = RotaryEmbedding(64, rotary_dim, 512, 10_000.0, neox, torch.float32)
    positions = torch.tensor([0, 3, 511, 17])
    query, key = torch.randn(4, 3 * 64), torch.randn(4, 64)
    plain = layer.forward_native(positions, query.clone(), key.clone())
    layer = layer.to(backend.traits.torch_device)
    turn = backend.graphs.graph(lambda positions, query, key: layer(positions, query, key))
    with Called() as called:
        turned = turn(*(backend.memory.upload(tensor.clone()) for tensor in (positions, query, key)))
    assert called.names == of_layer(backend, "rotary")
    for one, other in zip(turned, plain, strict=True):
        torch.testing.assert_close(backend.memory.download(one), other, **CLOSE)


def test_gated_activation(backend: DeviceBackend) -> None:
    from vllm.model_executor.layers.activation import SiluAndMul

    layer, x = SiluAndMul(), torch.randn(5, 96)
    run = backend.graphs.graph(lambda x: layer(x))
    with Called() as called:
        gated = run(backend.memory.upload(x.clone()))
    assert called.names == of_layer(backend, "gate")
    torch.testing.assert_close(backend.memory.download(gated), layer.forward_native(x), **CLOSE)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_l06_scaled_logits(backend: DeviceBackend, soft_cap: float | None) -> None:
    """Without the padding of the vocabulary, which makes them a view; no graph of a Gaudi updates one in place."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    weight_VH, hidden = torch.randn(64, 16), torch.randn(3, 16)
    expected = torch.nn.functional.linear(hidden, weight_VH)[:, :50]
    if soft_cap is not None:
        expected = soft_cap * torch.tanh(expected / soft_cap)
    weight = backend.memory.upload(weight_VH.clone())
    apply = SimpleNamespace(apply=lambda head, x, bias: torch.nn.functional.linear(x, weight))
    head = SimpleNamespace(quant_method=apply, tp_size=1)
    layer = LogitsProcessor(64, 50, scale=0.25, soft_cap=soft_cap)
    run = backend.graphs.graph(lambda x: layer(head, x))
    scaled = backend.memory.download(run(backend.memory.upload(hidden.clone())))
    torch.testing.assert_close(scaled, expected * 0.25, **CLOSE)

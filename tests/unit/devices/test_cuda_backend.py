"""The GPU backend beyond tests/conformance: uploads and downloads do not wait."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_gaudi_spec.attention.metadata import AttentionLayerSpec
from vllm_gaudi_spec.devices.common.kv_pair import KVPair

pytestmark = pytest.mark.cuda


@pytest.fixture
def backend() -> Iterator[Any]:
    from vllm_gaudi_spec.devices.cuda.backend import make_backend

    with torch.inference_mode():
        yield make_backend()


def test_captured_graphs_are_named(backend: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    run = backend.graphs.graph(step)
    for size in (1, 2, 1):
        run(backend.memory.upload(torch.ones(size)))
    assert backend.graphs.counts()["captured"] == {step.__qualname__: 2}


def test_uploads_and_downloads(backend: Any) -> None:
    read = backend.memory.num_host_syncs
    torch.cuda.set_sync_debug_mode("error")
    try:
        for dtype in (torch.int32, torch.int64, torch.float32):
            host = torch.arange(1000).to(dtype)
            there = backend.memory.upload(host)
            host.fill_(0)
            waits = backend.memory.start_download(there)
            there.fill_(0)
            assert torch.equal(waits(), torch.arange(1000).to(dtype))
            assert torch.equal(backend.memory.download(there), torch.zeros(1000, dtype=dtype))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert backend.memory.num_host_syncs - read == 6


@pytest.mark.parametrize("reads_own_cache", [True, False])
def test_attention_uses_kv_that_its_layer_just_wrote(
    backend: Any, reads_own_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that reads another layer's KV gets none, and neither does a second call."""
    from vllm_gaudi_spec.devices.cuda import attention as cuda_attention

    spec = AttentionLayerSpec(
        num_heads=2,
        num_kv_heads=2,
        head_size=64,
        scale=0.125,
        sliding_window=None,
        logits_soft_cap=0.0,
        dtype=torch.float32,
        block_size=16,
    )
    own_kv: list[Any] = []
    monkeypatch.setattr(cuda_attention, "attend", lambda *args: own_kv.append(args[-1]))
    written, other = (KVPair(*torch.zeros(2, 32, 2, 64, device="cuda").unbind(0), 16) for _ in range(2))
    key, value = torch.randn(2, 1, 2, 64, device="cuda").unbind(0)
    backend.attention.write_kv(key, value, written, torch.tensor([16], device="cuda"), spec)
    for _ in range(2):
        backend.attention.attend(key, written if reads_own_cache else other, SimpleNamespace(spans=None), spec)
    assert own_kv[0] == ((key, value) if reads_own_cache else None)
    assert own_kv[1] is None

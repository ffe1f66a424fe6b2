"""Facts about the KV cache that runners derive from the engine's plan."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from vllm_gaudi_spec.runner.kv_cache import KVCache

SIZES: dict[str, Any] = dict(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)


@pytest.mark.parametrize(
    ("spec", "keeps_blocks"),
    [
        (FullAttentionSpec(**SIZES), True),
        (MLAAttentionSpec(**SIZES), True),
        (SlidingWindowSpec(**SIZES, sliding_window=32), False),
        (ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=32), False),
    ],
    ids=["full", "latent", "window", "chunks"],
)
def test_requests_keep_blocks_only_under_full_attention(spec: Any, keeps_blocks: bool) -> None:
    """vLLM's managers of windows and chunks free blocks while a request runs, so two rows may list the same block."""
    memory = SimpleNamespace(allocate_kv=lambda config, layout: {}, make_block_copier=lambda caches: None)
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: None))
    backend: Any = SimpleNamespace(memory=memory)
    kv_cache = KVCache(KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], spec)]), config, backend)
    assert kv_cache.keeps_blocks == keeps_blocks

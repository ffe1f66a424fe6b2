"""KV as two tensors per layer, and which layers share memory."""

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.common import kv_pair

BLOCK, BLOCKS = 16, 3


def plan(layers: list[dict[str, Any]]) -> KVCacheConfig:
    groups, tensors = [], []
    for layer in layers:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=layer["size"], dtype=torch.float32)
        page = spec.page_size_bytes
        groups.append(KVCacheGroupSpec([layer["name"]], spec))
        tensors.append(KVCacheTensor(1 << 30, [layer["name"]], page * BLOCKS, page, layer["offset"]))
    return KVCacheConfig(BLOCKS, tensors, groups)


def test_layers_at_one_offset_share_their_kv() -> None:
    layers = [dict(name=name, size=64, offset=offset) for name, offset in (("a", 0), ("b", 4096), ("c", 0))]
    found = kv_pair.allocate(plan(layers), torch.device("cpu"))
    assert found["a"] is found["c"]
    assert found["a"].keys is not found["b"].keys
    assert found["a"].keys.shape == (BLOCKS * BLOCK, 2, 64)
    layers[2]["size"] = 32
    with pytest.raises(UnsupportedConfigError, match="c shares KV memory with a layer of another shape"):
        kv_pair.allocate(plan(layers), torch.device("cpu"))

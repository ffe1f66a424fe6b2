"""KV as two tensors per layer, and which layers share memory."""

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.common import kv_pair

BLOCK, BLOCKS = 16, 3


def plan(size_of_c: int) -> KVCacheConfig:
    groups, tensors = [], []
    for name, size, offset in (("a", 64, 0), ("b", 64, 4096), ("c", size_of_c, 0)):
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=size, dtype=torch.float32)
        page = spec.page_size_bytes
        groups.append(KVCacheGroupSpec([name], spec))
        tensors.append(KVCacheTensor(1 << 30, [name], page * BLOCKS, page, offset))
    return KVCacheConfig(BLOCKS, tensors, groups)


def test_layers_at_one_offset_share_their_kv() -> None:
    found = kv_pair.allocate(plan(size_of_c=64), torch.device("cpu"))
    assert found["a"] is found["c"]
    assert found["a"].keys is not found["b"].keys
    assert found["a"].keys.shape == (BLOCKS * BLOCK, 2, 64)
    with pytest.raises(UnsupportedConfigError, match="c shares memory with a layer that has another shape"):
        kv_pair.allocate(plan(size_of_c=32), torch.device("cpu"))

"""The base class of quantization configurations, and their registry.

Imported with general plugins, before a process may import layers. Breaks when a configuration is asked for something
else.
"""

from typing import Any

from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase


def make_kv_cache_method(config: QuantizationConfig, *, has_scales_by_head: bool) -> Any:
    """Return the method that reads the scales of an attention layer's KV."""
    if not has_scales_by_head:
        from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

        return BaseKVCacheMethod(config)
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsKVCacheMethod,
    )

    return CompressedTensorsKVCacheMethod(config)

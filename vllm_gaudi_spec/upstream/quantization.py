"""The base class and the registry of quantization configurations.

This module is imported when vLLM loads its general plugins. At that time, it must not import layers. It breaks if vLLM
changes the interface of quantization configurations.
"""

from typing import Any

from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase


def make_kv_cache_method(config: QuantizationConfig, *, has_scales_by_head: bool) -> Any:
    """Return the method that loads the KV scales of an attention layer."""
    if not has_scales_by_head:
        from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

        return BaseKVCacheMethod(config)
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsKVCacheMethod,
    )

    return CompressedTensorsKVCacheMethod(config)

"""The specifications of KV caches, how layers are grouped by them, and the base class of the layers that have one.

Breaks when a specification gets another field, or layers are grouped by another rule.
"""

from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase as AttentionLayerBase
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups as get_kv_cache_config_from_groups
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups as get_kv_cache_groups
from vllm.v1.kv_cache_interface import AttentionSpec as AttentionSpec
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec as ChunkedLocalAttentionSpec
from vllm.v1.kv_cache_interface import FullAttentionSpec as FullAttentionSpec
from vllm.v1.kv_cache_interface import KVCacheConfig as KVCacheConfig
from vllm.v1.kv_cache_interface import KVCacheGroupSpec as KVCacheGroupSpec
from vllm.v1.kv_cache_interface import KVCacheLayout as KVCacheLayout
from vllm.v1.kv_cache_interface import KVCacheSpec as KVCacheSpec
from vllm.v1.kv_cache_interface import KVCacheTensor as KVCacheTensor
from vllm.v1.kv_cache_interface import MLAAttentionSpec as MLAAttentionSpec
from vllm.v1.kv_cache_interface import SlidingWindowSpec as SlidingWindowSpec
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs as UniformTypeKVCacheSpecs

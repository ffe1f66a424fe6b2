"""Functions that group the layers of a model by their KV, and that allocate and release its memory.

Breaks when their arguments change. They import vLLM's layers, so only workers and the CPU's backend import this module.
"""

from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups as get_kv_cache_config_from_groups
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups as get_kv_cache_groups
from vllm.v1.worker.utils import allocate_kv_cache as allocate_kv_cache
from vllm.v1.worker.utils import clear_layer_kv_caches as clear_layer_kv_caches

"""The base class of workers, the memory of their KV, and the proposer that a user's class is wrapped in.

Breaks when an executor calls a worker by another name or with other arguments.
"""

from vllm.utils.torch_utils import set_default_torch_dtype, set_random_seed
from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer
from vllm.v1.worker.utils import allocate_kv_cache, clear_layer_kv_caches
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

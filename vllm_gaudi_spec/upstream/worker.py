"""The base class of workers, their profiler and KV memory, and the proposer that wraps a user-defined drafter class.

Our worker breaks if an executor calls its methods by different names or with different arguments.
"""

from vllm.distributed.utils import get_worker_rank_suffix
from vllm.profiler.wrapper import WorkerProfiler, create_worker_profiler, validate_worker_profiler_config
from vllm.utils.torch_utils import set_default_torch_dtype, set_random_seed
from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer
from vllm.v1.worker.utils import allocate_kv_cache, clear_layer_kv_caches
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

"""vLLM's KV connectors and the wrapper that vLLM's second model runner puts around a step.

Breaks if a connector is called at another point in a step or looks for its layers elsewhere.
"""

from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

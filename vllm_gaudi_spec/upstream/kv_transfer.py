"""vLLM's KV connectors, and the context manager in which vLLM's second model runner executes a step.

KV transfer breaks if connectors must be called at a different point in a step or find their layers in a different
place.
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

"""The base classes of attention backends, and the forward context in which layers find their metadata.

This module breaks if vLLM changes the interface of backends, metadata builders, or implementations, or the arguments of
`set_forward_context`.
"""

from vllm.forward_context import get_forward_context, is_forward_context_available, set_forward_context
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

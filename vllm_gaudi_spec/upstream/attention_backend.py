"""The base classes of attention backends, and the context of a forward pass, in which layers find their metadata.

Breaks when vLLM asks a backend, its metadata builder or its implementation for something else, or when
`set_forward_context` takes other arguments.
"""

from vllm.forward_context import get_forward_context, is_forward_context_available, set_forward_context
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

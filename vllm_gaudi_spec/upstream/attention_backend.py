"""The base classes of attention backends, and the context of a forward pass, in which layers find their metadata.

Breaks when vLLM asks a backend, its metadata builder or its implementation for something else, or when
`set_forward_context` takes other arguments.
"""

from vllm.forward_context import get_forward_context as get_forward_context
from vllm.forward_context import is_forward_context_available as is_forward_context_available
from vllm.forward_context import set_forward_context as set_forward_context
from vllm.v1.attention.backend import AttentionBackend as AttentionBackend
from vllm.v1.attention.backend import AttentionImpl as AttentionImpl
from vllm.v1.attention.backend import AttentionMetadataBuilder as AttentionMetadataBuilder
from vllm.v1.attention.backend import AttentionType as AttentionType
from vllm.v1.attention.backend import MultipleOf as MultipleOf

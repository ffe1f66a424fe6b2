"""The base classes of attention backends.

Breaks when vLLM asks a backend, its metadata builder or its implementation for something else.
"""

from vllm.v1.attention.backend import AttentionBackend as AttentionBackend
from vllm.v1.attention.backend import AttentionImpl as AttentionImpl
from vllm.v1.attention.backend import AttentionMetadataBuilder as AttentionMetadataBuilder
from vllm.v1.attention.backend import AttentionType as AttentionType
from vllm.v1.attention.backend import MultipleOf as MultipleOf

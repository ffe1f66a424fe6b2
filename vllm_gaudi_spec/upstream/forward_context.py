"""The context of a forward pass, through which layers find their metadata.

Breaks when `set_forward_context` takes other arguments.
"""

from vllm.forward_context import get_forward_context as get_forward_context
from vllm.forward_context import is_forward_context_available as is_forward_context_available
from vllm.forward_context import set_forward_context as set_forward_context

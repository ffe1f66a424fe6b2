"""Decoder layers of the models that the CUDA backend runs with kernels of its own.

Breaks when one of these layers computes something else in its forward.
"""

from vllm.model_executor.models.llama import LlamaAttention as LlamaAttention
from vllm.model_executor.models.llama import LlamaDecoderLayer as LlamaDecoderLayer
from vllm.model_executor.models.llama import LlamaMLP as LlamaMLP
from vllm.model_executor.models.qwen2 import Qwen2Attention as Qwen2Attention
from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer as Qwen2DecoderLayer
from vllm.model_executor.models.qwen2 import Qwen2MLP as Qwen2MLP
from vllm.model_executor.models.qwen3 import Qwen3Attention as Qwen3Attention
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer as Qwen3DecoderLayer

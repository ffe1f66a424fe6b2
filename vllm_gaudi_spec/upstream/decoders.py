"""The decoder layers of vLLM's models that the CUDA backend runs with its own kernels.

The CUDA backend breaks if the forward method of one of these layers computes something different.
"""

from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP
from vllm.model_executor.models.qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP
from vllm.model_executor.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer

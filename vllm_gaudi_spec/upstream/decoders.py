"""Decoder layers of the models that the CUDA backend runs with its own kernels.

Breaks when the forward of one of these layers changes what it computes.
"""

from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP
from vllm.model_executor.models.qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP
from vllm.model_executor.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer

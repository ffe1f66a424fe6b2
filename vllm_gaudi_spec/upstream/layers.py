"""Layers of vLLM's models other than linear ones.

Breaks when a layer that we subclass or replace has another constructor or another forward.
"""

from vllm import ir as ir
from vllm.model_executor.layers.activation import SiluAndMul as SiluAndMul
from vllm.model_executor.layers.attention import Attention as Attention
from vllm.model_executor.layers.attention import MLAAttention as MLAAttention
from vllm.model_executor.layers.attention import MMEncoderAttention as MMEncoderAttention
from vllm.model_executor.layers.fused_moe.activation import MoEActivation as MoEActivation
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner as MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod as UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.layernorm import RMSNorm as RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor as LogitsProcessor
from vllm.model_executor.layers.mamba.abstract import MambaBase as MambaBase
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper as MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding as RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase as RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import (
    DeepseekScalingRotaryEmbedding as DeepseekScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding as MRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import apply_interleaved_rope as apply_interleaved_rope

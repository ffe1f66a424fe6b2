"""Layers of vLLM's models, with the methods and parameters of linear ones.

Breaks when a layer that we subclass or replace has another constructor or another forward, a method is asked for
something else, or a parameter is loaded in another way.
"""

import torch
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
from vllm.model_executor.layers.linear import ColumnParallelLinear as ColumnParallelLinear
from vllm.model_executor.layers.linear import LinearBase as LinearBase
from vllm.model_executor.layers.linear import LinearMethodBase as LinearMethodBase
from vllm.model_executor.layers.linear import MergedColumnParallelLinear as MergedColumnParallelLinear
from vllm.model_executor.layers.linear import QKVParallelLinear as QKVParallelLinear
from vllm.model_executor.layers.linear import ReplicatedLinear as ReplicatedLinear
from vllm.model_executor.layers.linear import RowParallelLinear as RowParallelLinear
from vllm.model_executor.layers.linear import UnquantizedLinearMethod as UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor as LogitsProcessor
from vllm.model_executor.layers.mamba.abstract import MambaBase as MambaBase
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper as MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_scale_parameter as create_fp8_scale_parameter,
)
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_weight_parameter as create_fp8_weight_parameter,
)
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding as RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase as RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import (
    DeepseekScalingRotaryEmbedding as DeepseekScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding as MRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import apply_interleaved_rope as apply_interleaved_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead as ParallelLMHead
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod as UnquantizedEmbeddingMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding as VocabParallelEmbedding
from vllm.model_executor.parameter import ChannelQuantScaleParameter as ChannelQuantScaleParameter
from vllm.model_executor.parameter import GroupQuantScaleParameter as GroupQuantScaleParameter
from vllm.model_executor.parameter import PackedvLLMParameter as PackedvLLMParameter
from vllm.model_executor.utils import replace_parameter as replace_parameter


def batch_invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute `torch.nn.functional.linear` so that a row's bits do not depend on the number of rows.

    Reason: vLLM's Triton kernel adds up the products of a row in one order whatever the number of rows. The mode that
    it belongs to replaces operators of torch for the whole process, drafters included.
    Remove when: vLLM offers the kernel outside its private modules.
    """
    from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant

    out: torch.Tensor = linear_batch_invariant(x, weight, bias)
    return out

"""vLLM's CPU kernels and the functions that choose between them.

This module breaks if the arguments of a kernel change. `tests/conformance` runs each kernel.
"""

import torch
from vllm import _custom_ops as custom_ops
from vllm.model_executor.layers import utils as layer_utils

__all__ = ["choose_instruction_set", "custom_ops", "has_expert_kernels", "layer_utils"]


def choose_instruction_set(dtype: torch.dtype, block_size: int, head_size: int) -> str:
    """Return the vector instruction set that vLLM chooses for an attention layer."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(dtype, block_size, head_size)


def has_expert_kernels() -> bool:
    """Whether this CPU has expert kernels for at least one format. vLLM determines the format when it loads a model."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    kernels = [value for name, value in vars(cpu_moe).items() if "CPUExperts" in name]
    return any(experts._supports_current_device() for experts in kernels)

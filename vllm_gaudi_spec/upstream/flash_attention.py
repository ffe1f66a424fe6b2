"""FlashAttention, which vLLM builds into its CUDA wheel.

Reason: its kernels are the fastest for long prompts, and they read paged KV. Condition of removal: PyTorch has kernels
for sequences of several lengths over paged KV. Test: `tests/unit/devices/test_cuda_prompts.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from vllm.logger import init_logger

logger = init_logger(__name__)


@cache
def find_flash_attention() -> Callable[..., torch.Tensor] | None:
    """Return vLLM's `flash_attn_varlen_func` with its version for this GPU, or None if vLLM was built without it."""
    try:
        from vllm.vllm_flash_attn import flash_attn_interface as interface
    except ImportError as error:
        logger.warning("vLLM has no FlashAttention here (%s), so long prompts take longer.", error)
        return None
    major = torch.cuda.get_device_capability()[0]
    if major == 9 and interface.FA3_AVAILABLE:
        return partial(interface.flash_attn_varlen_func, fa_version=3, num_splits=1)
    if major >= 8 and interface.FA2_AVAILABLE:
        return partial(interface.flash_attn_varlen_func, fa_version=2)
    logger.warning("vLLM's FlashAttention does not support this GPU, so long prompts take longer.")
    return None

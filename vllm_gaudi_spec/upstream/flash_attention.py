"""FlashAttention, which is included in vLLM's CUDA wheel.

Reason: its kernels are the fastest for long prompts, and they support paged KV.
Remove when: PyTorch has kernels for sequences of different lengths with paged KV.
Test: `tests/unit/devices/test_cuda_prompts.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from vllm.logger import init_logger

logger = init_logger(__name__)


@cache
def find_flash_attention() -> Callable[..., torch.Tensor] | None:
    """Return vLLM's `flash_attn_varlen_func`, or None if vLLM has no FlashAttention 3 for this GPU.

    FlashAttention 2 is not used, because it starts instances for every row, and most of them would have no work.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    try:
        from vllm.vllm_flash_attn import flash_attn_interface as interface
    except ImportError as error:
        logger.warning("vLLM has no FlashAttention here (%s), so long prompts take longer.", error)
        return None
    if not interface.FA3_AVAILABLE:
        logger.warning("Long prompts take longer without FlashAttention 3: %s", interface.FA3_UNAVAILABLE_REASON)
        return None
    return partial(interface.flash_attn_varlen_func, fa_version=3, num_splits=1)

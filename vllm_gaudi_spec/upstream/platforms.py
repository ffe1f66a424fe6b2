"""vLLM's CPU platform, which ours subclasses, and helper functions for platforms.

This module is imported while vLLM itself is only partly imported, so it must not import modules that need the platform.
It breaks if upstream moves a helper function, as often happens in `vllm.utils`, or changes the hooks that
`devices/cpu/platform.py` overrides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform
from vllm.utils.cpu_resource_utils import get_visible_memory_node
from vllm.utils.import_utils import resolve_obj_by_qualname

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser


def get_kv_cache_quant_algo_string(written: dict[str, Any]) -> str | None:
    """Call the vLLM function of the same name. In vLLM 0.33, importing its module requires the platform."""
    from vllm.utils import torch_utils

    found: str | None = torch_utils.get_kv_cache_quant_algo_string(written)
    return found

"""vLLM's CPU platform, from which ours derives, and the helper functions that platforms use.

Imported while vLLM itself is half imported, so it takes from modules that import no platform. Breaks when upstream
changes the hooks that `devices/cpu/platform.py` overrides, or moves a helper: it reorganizes `vllm.utils` often.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform
from vllm.utils.cpu_resource_utils import get_visible_memory_node
from vllm.utils.import_utils import resolve_obj_by_qualname

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser


def get_kv_cache_quant_algo_string(written: dict[str, Any]) -> str | None:
    """Call the function of that name, whose module asks for the platform when vLLM 0.33 imports it."""
    from vllm.utils import torch_utils

    found: str | None = torch_utils.get_kv_cache_quant_algo_string(written)
    return found

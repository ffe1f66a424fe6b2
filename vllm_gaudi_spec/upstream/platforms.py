"""vLLM's CPU platform, from which ours derives, and the helper functions that platforms use.

Imported while vLLM itself is half imported, so it takes from modules that import no platform. Breaks when upstream
changes the hooks that `platforms/cpu.py` overrides, or moves a helper: it reorganizes `vllm.utils` often.
"""

from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform
from vllm.utils.cpu_resource_utils import get_visible_memory_node
from vllm.utils.func_utils import supports_kw
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.utils.torch_utils import get_kv_cache_quant_algo_string, set_default_torch_dtype, set_random_seed

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

"""vLLM's helper functions.

A platform imports this module while vLLM itself is half imported, so it takes from modules that import no platform.
Breaks when a helper moves: upstream reorganizes `vllm.utils` often.
"""

from typing import TYPE_CHECKING

from vllm.utils.func_utils import supports_kw as supports_kw
from vllm.utils.import_utils import resolve_obj_by_qualname as resolve_obj_by_qualname
from vllm.utils.torch_utils import get_kv_cache_quant_algo_string as get_kv_cache_quant_algo_string
from vllm.utils.torch_utils import set_default_torch_dtype as set_default_torch_dtype
from vllm.utils.torch_utils import set_random_seed as set_random_seed

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser as FlexibleArgumentParser

"""vLLM names that command-line tools use to configure engines and compare output texts.

This module breaks if one of these names changes.
"""

from vllm.transformers_utils.config import get_config
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

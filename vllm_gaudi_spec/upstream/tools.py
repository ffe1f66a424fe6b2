"""What the command line takes from vLLM to configure engines and to compare their texts.

Breaks when one of these is renamed.
"""

from vllm.transformers_utils.config import get_config
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

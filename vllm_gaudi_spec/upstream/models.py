"""What vLLM knows about its model classes, and what they exchange.

Breaks when an interface is renamed. The classes themselves are in `decoders.py`.
"""

from typing import TYPE_CHECKING

from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first as is_conv_state_dim_first
from vllm.model_executor.models import ModelRegistry as ModelRegistry
from vllm.model_executor.models import supports_lora as supports_lora
from vllm.model_executor.models.interfaces import requires_raw_input_tokens as requires_raw_input_tokens
from vllm.model_executor.models.interfaces import supports_eagle3 as supports_eagle3
from vllm.model_executor.models.interfaces import supports_mrope as supports_mrope
from vllm.model_executor.models.utils import WeightsMapper as WeightsMapper
from vllm.sequence import IntermediateTensors as IntermediateTensors
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import (
    get_eagle3_aux_layers_from_config as get_eagle3_aux_layers_from_config,
)

if TYPE_CHECKING:
    from vllm.model_executor.models.deepseek_v2 import Indexer as Indexer

"""What vLLM knows about its model classes, what they exchange, and how they are loaded and run, encoders included.

Breaks when an interface is renamed, a loader takes other arguments, an encoder is run with other inputs, or the cache
keeps its outputs in another form. The classes themselves are in `decoders.py` and `recurrent.py`.
"""

from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first as is_conv_state_dim_first
from vllm.model_executor.model_loader import ShardedStateLoader as ShardedStateLoader
from vllm.model_executor.model_loader import get_model as get_model
from vllm.model_executor.model_loader import get_model_loader as get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload as finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.inplace import reload_weights as reload_weights
from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests as compute_tensor_digests
from vllm.model_executor.model_loader.weight_utils import (
    filter_duplicate_safetensors_files as filter_duplicate_safetensors_files,
)
from vllm.model_executor.models import ModelRegistry as ModelRegistry
from vllm.model_executor.models import supports_lora as supports_lora
from vllm.model_executor.models.interfaces import requires_raw_input_tokens as requires_raw_input_tokens
from vllm.model_executor.models.interfaces import supports_eagle3 as supports_eagle3
from vllm.model_executor.models.interfaces import supports_mrope as supports_mrope
from vllm.model_executor.models.utils import WeightsMapper as WeightsMapper
from vllm.multimodal.encoder_budget import MultiModalBudget as MultiModalBudget
from vllm.multimodal.utils import get_mm_features_in_window as get_mm_features_in_window
from vllm.multimodal.utils import group_and_batch_mm_kwargs as group_and_batch_mm_kwargs
from vllm.sequence import IntermediateTensors as IntermediateTensors
from vllm.v1.worker.gpu.attn_utils import compute_mm_prefix_ranges as compute_mm_prefix_ranges
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache as EncoderCache
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner as EncoderRunner
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import (
    get_eagle3_aux_layers_from_config as get_eagle3_aux_layers_from_config,
)

if TYPE_CHECKING:
    from vllm.model_executor.models.deepseek_v2 import Indexer as Indexer


def position_ids_in_meshgrid(*args: Any, **named: Any) -> Any:
    """Call the function of that name, whose import needs torchvision, which other models do without."""
    from vllm.model_executor.models.pixtral import position_ids_in_meshgrid

    return position_ids_in_meshgrid(*args, **named)

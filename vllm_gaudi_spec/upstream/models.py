"""vLLM's model interfaces and registry, and the functions that load and run models, including encoders.

This module breaks if an interface is renamed, if the arguments of a loader or the inputs of an encoder change, or if
the cache stores encoder outputs differently. Layers of models are in `decoders.py` and `recurrent.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.model_executor.model_loader.weight_utils import filter_duplicate_safetensors_files
from vllm.model_executor.models import ModelRegistry, supports_lora
from vllm.model_executor.models.interfaces import requires_raw_input_tokens, supports_eagle3, supports_mrope
from vllm.model_executor.models.utils import PPMissingLayer, WeightsMapper
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.utils import get_mm_features_in_window, group_and_batch_mm_kwargs
from vllm.sequence import IntermediateTensors
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

from vllm_gaudi_spec.upstream.release import FROM_0_33

if TYPE_CHECKING:
    from vllm.model_executor.models.deepseek_v2 import Indexer
    from vllm.multimodal.inputs import MultiModalFeatureSpec


def find_bidirectional_spans(
    features: list[list[MultiModalFeatureSpec]], sliding_window: int | None
) -> dict[int, list[tuple[int, int]]]:
    """Return the first and last positions of the images and videos in each request, keyed by the request's index.

    Images and videos that do not fit in the sliding window are omitted.
    """
    if FROM_0_33:
        from vllm.v1.attention.backends.utils import compute_mm_prefix_ranges

        return compute_mm_prefix_ranges(features, sliding_window)
    from vllm.v1.worker.gpu.attn_utils import compute_mm_prefix_ranges

    names = [str(row) for row in range(len(features))]
    return compute_mm_prefix_ranges(names, dict(zip(names, features, strict=True)), sliding_window)


def position_ids_in_meshgrid(*args: Any, **named: Any) -> Any:
    """Call the vLLM function of the same name. Importing it requires torchvision, which other models do not need."""
    from vllm.model_executor.models.pixtral import position_ids_in_meshgrid

    return position_ids_in_meshgrid(*args, **named)

"""Functions that load, reload and save the weights of models.

Breaks when their arguments change.
"""

from vllm.model_executor.model_loader import ShardedStateLoader as ShardedStateLoader
from vllm.model_executor.model_loader import get_model as get_model
from vllm.model_executor.model_loader import get_model_loader as get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload as finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.inplace import reload_weights as reload_weights
from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests as compute_tensor_digests
from vllm.model_executor.model_loader.weight_utils import (
    filter_duplicate_safetensors_files as filter_duplicate_safetensors_files,
)

"""Layers with adapters, and the managers that load and activate adapters.

Breaks when the managers keep adapters in another form; `lora/` derives from both of them.
"""

from vllm.lora.layers import BaseLayerWithLoRA as BaseLayerWithLoRA
from vllm.lora.layers import LogitsProcessorWithLoRA as LogitsProcessorWithLoRA
from vllm.lora.layers import VocabParallelEmbeddingWithLoRA as VocabParallelEmbeddingWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA as BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel as LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights as LoRALayerWeights
from vllm.lora.model_manager import LRUCacheLoRAModelManager as LRUCacheLoRAModelManager
from vllm.lora.utils import get_adapter_absolute_path as get_adapter_absolute_path
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager as LRUCacheWorkerLoRAManager

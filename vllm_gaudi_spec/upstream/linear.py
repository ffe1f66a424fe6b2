"""Linear layers and embeddings, their methods and parameters.

Breaks when a method is asked for something else, or a parameter is loaded in another way.
"""

from vllm.model_executor.layers.linear import ColumnParallelLinear as ColumnParallelLinear
from vllm.model_executor.layers.linear import LinearBase as LinearBase
from vllm.model_executor.layers.linear import LinearMethodBase as LinearMethodBase
from vllm.model_executor.layers.linear import MergedColumnParallelLinear as MergedColumnParallelLinear
from vllm.model_executor.layers.linear import QKVParallelLinear as QKVParallelLinear
from vllm.model_executor.layers.linear import ReplicatedLinear as ReplicatedLinear
from vllm.model_executor.layers.linear import RowParallelLinear as RowParallelLinear
from vllm.model_executor.layers.linear import UnquantizedLinearMethod as UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_scale_parameter as create_fp8_scale_parameter,
)
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_weight_parameter as create_fp8_weight_parameter,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead as ParallelLMHead
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod as UnquantizedEmbeddingMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding as VocabParallelEmbedding
from vllm.model_executor.parameter import ChannelQuantScaleParameter as ChannelQuantScaleParameter
from vllm.model_executor.parameter import GroupQuantScaleParameter as GroupQuantScaleParameter
from vllm.model_executor.parameter import PackedvLLMParameter as PackedvLLMParameter
from vllm.model_executor.utils import replace_parameter as replace_parameter

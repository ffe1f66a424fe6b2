"""What the poolers of vLLM's models take.

Breaks when a pooler needs other metadata.
"""

from vllm.v1.pool.late_interaction_runner import LateInteractionRunner as LateInteractionRunner
from vllm.v1.pool.metadata import PoolingMetadata as PoolingMetadata
from vllm.v1.pool.metadata import PoolingStates as PoolingStates

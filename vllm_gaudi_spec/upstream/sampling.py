"""Logits processors, vLLM's own and those that users install, and what poolers take.

Breaks when a processor is told about the batch in another form, or a pooler needs other metadata.
"""

from vllm.v1.pool.late_interaction_runner import LateInteractionRunner
from vllm.v1.pool.metadata import PoolingMetadata, PoolingStates
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    LOGITSPROCS_GROUP,
    BatchUpdate,
    LogitsProcessor,
    build_logitsprocs,
)

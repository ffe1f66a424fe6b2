"""Logits processors from vLLM and from installed packages, and the inputs of poolers.

This module breaks if batches are described to processors differently, or if a pooler needs other metadata.
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

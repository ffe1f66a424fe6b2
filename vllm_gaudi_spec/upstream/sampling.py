"""Logits processors from vLLM and from installed packages, and the inputs of poolers.

This module breaks if vLLM describes batches to logits processors differently, or if poolers need different metadata.
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

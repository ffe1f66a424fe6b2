"""Logits processors, vLLM's own and those that users install, and what poolers take.

Breaks when a processor is told about the batch in another form, or a pooler needs other metadata.
"""

from vllm.v1.pool.late_interaction_runner import LateInteractionRunner as LateInteractionRunner
from vllm.v1.pool.metadata import PoolingMetadata as PoolingMetadata
from vllm.v1.pool.metadata import PoolingStates as PoolingStates
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS as BUILTIN_LOGITS_PROCESSORS
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP as LOGITSPROCS_GROUP
from vllm.v1.sample.logits_processor import BatchUpdate as BatchUpdate
from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessor
from vllm.v1.sample.logits_processor import build_logitsprocs as build_logitsprocs

"""Logits processors: vLLM's own, and those that users install.

Breaks when a processor is told about the batch in another form.
"""

from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS as BUILTIN_LOGITS_PROCESSORS
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP as LOGITSPROCS_GROUP
from vllm.v1.sample.logits_processor import BatchUpdate as BatchUpdate
from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessor
from vllm.v1.sample.logits_processor import build_logitsprocs as build_logitsprocs

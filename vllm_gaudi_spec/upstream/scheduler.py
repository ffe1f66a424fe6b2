"""vLLM's schedulers, from which ours derive, with their requests, statistics, and what they send to workers.

Breaks when a method that we override changes (`overrides.py` lists the private ones), or a field that the runner reads.
"""

from vllm.v1.core.kv_cache_manager import KVCacheBlocks as KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHash as BlockHash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as AsyncScheduler
from vllm.v1.core.sched.interface import PauseState as PauseState
from vllm.v1.core.sched.output import CachedRequestData as CachedRequestData
from vllm.v1.core.sched.output import GrammarOutput as GrammarOutput
from vllm.v1.core.sched.output import NewRequestData as NewRequestData
from vllm.v1.core.sched.output import SchedulerOutput as SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler as Scheduler
from vllm.v1.engine import EngineCoreOutput as EngineCoreOutput
from vllm.v1.engine import EngineCoreOutputs as EngineCoreOutputs
from vllm.v1.engine import FinishReason as FinishReason
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics as RequestSpecDecodeMetrics
from vllm.v1.metrics.stats import SchedulerStats as SchedulerStats
from vllm.v1.request import Request as Request
from vllm.v1.request import RequestStatus as RequestStatus
from vllm.v1.request import StreamingUpdate as StreamingUpdate
from vllm.v1.spec_decode.metrics import SpecDecodingStats as SpecDecodingStats

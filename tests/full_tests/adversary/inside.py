"""A worker extension that reports what is left in the engine's process, from its scheduler and its living objects."""

import gc
import sys
from collections import Counter
from typing import Any

from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request as EngineRequest

from vllm_gaudi_spec.drafting.universal.timeline import Timeline
from vllm_gaudi_spec.outputs import SpecSchedulerOutput
from vllm_gaudi_spec.records import Batch, PromptScores, Request, StepResult
from vllm_gaudi_spec.runner.report import Report

# Made for a request or for a step; none of them should outlive what it was made for by more than a step.
SHORT_LIVED = (EngineRequest, SpecSchedulerOutput, Request, Batch, StepResult, Report, PromptScores, Timeline)


class Inside:
    """A class for `--worker-extension-cls`. The engine's loop calls a worker that is in the engine's process."""

    def inside(self) -> dict[str, Any]:
        engine = _engine()
        scheduler: Any = engine.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        acceptance = getattr(scheduler, "_acceptance", None)
        return {
            "blocks": pool.num_gpu_blocks - 1,  # block 0 is padding
            "free_blocks": pool.get_num_free_blocks(),
            "scheduler": {
                "requests": len(scheduler.requests),
                "running": len(scheduler.running),
                "waiting": len(scheduler.waiting),
                "deferred": len(scheduler.deferred_waiting),
                "unreported": len(scheduler.finished_req_ids),
                "steps_in_flight": len(engine.batch_queue or ()),
                "estimated_requests": len(acceptance._by_id) if acceptance is not None else 0,
            },
            "alive": _alive(),
        }


def _engine() -> EngineCore:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if isinstance(owner := frame.f_locals.get("self"), EngineCore):
            return owner
    raise RuntimeError("this needs a worker in the engine's own process")


def _alive() -> dict[str, int]:
    gc.collect()
    counts = Counter(type(thing) for thing in gc.get_objects())
    return {f"{kind.__module__.split('.')[0]}.{kind.__name__}": counts[kind] for kind in SHORT_LIVED}

"""vLLM's schedulers, with a say in how much is drafted behind each step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_gaudi_spec.config import Options
from vllm_gaudi_spec.devices import load_backend
from vllm_gaudi_spec.runner.shapes import Shapes
from vllm_gaudi_spec.scheduling import health, metrics
from vllm_gaudi_spec.scheduling.goodput import Goodput
from vllm_gaudi_spec.scheduling.lengths import Lengths

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

logger = init_logger(__name__)


class _Pace(NamedTuple):
    """What of a step's way has to be remembered until it is done."""

    num_rows: int
    drafted: bool
    """Whether drafts were to be made behind the step before, for this one to verify."""
    drafts: bool
    """Whether they are to be made behind this one."""
    only_decodes: bool


_NO_PACE = _Pace(0, False, False, False)
"""Of a step that was not paced: the one behind it can not be timed."""


class _Paced(Scheduler):
    """Before one of vLLM's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = Options.from_vllm(self.vllm_config)
        self._goodput: Goodput | None = None
        if options.goodput:
            shapes = Shapes.from_config(self.vllm_config, options, load_backend(), self.num_spec_tokens)
            self._goodput = Goodput(shapes.decode_rows)
        self._lengths = Lengths(self.num_spec_tokens) if options.adaptive else None
        self._drafts = False
        self._last = (0.0, _NO_PACE)
        self._paces: dict[int, _Pace] = {}
        """Of steps that are not done, by the identity of vLLM's word for them."""

    # --- while a step is scheduled ---

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        health.tell(self, scheduler_output)  # where the drafter is off there is nothing to pace
        if self._lengths is not None:
            self._lengths.forget(scheduler_output.finished_req_ids)
        if (sampling := self._sampling(scheduler_output)) and scheduler_output.num_spec_tokens_to_schedule:
            self._pace(scheduler_output, sampling)
        else:
            self._drafts = False
        super()._update_after_schedule(scheduler_output)
        for req_id, most in getattr(scheduler_output, "most_drafts", {}).items():
            # Where steps overlap these are places for drafts; else nothing stands here yet.
            request = self.requests[req_id]
            request.spec_token_ids = request.spec_token_ids[:most]

    def _sampling(self, scheduled: SchedulerOutput) -> list[str]:
        """Requests of a step that are past their prompts when it is done: what has a use for drafts."""
        return [
            req_id
            for req_id, count in scheduled.num_scheduled_tokens.items()
            if (request := self.requests[req_id]).num_computed_tokens + count
            >= request.num_tokens + request.num_output_placeholders
        ]

    def _pace(self, scheduled: SchedulerOutput, sampling: list[str]) -> None:
        only_decodes = _only_decodes(scheduled)
        drafts = self._goodput is None or self._goodput.drafts(len(sampling), may_try=only_decodes)
        spared_for = metrics.GOODPUT
        if drafts and self._lengths is not None:
            # The runner looks for it: what each of these requests may draft behind this step.
            scheduled.most_drafts = self._lengths.choose(sampling)
            drafts, spared_for = any(scheduled.most_drafts.values()), metrics.ACCEPTANCE
        if not drafts:
            scheduled.num_spec_tokens_to_schedule = 0
            scheduled.spared_for = spared_for
            metrics.count(self, metrics.SPARED_STEPS)
        self._paces[id(scheduled)] = _Pace(len(sampling), self._drafts, drafts, only_decodes)
        self._drafts = drafts

    # --- when it is done ---

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        pace = self._paces.pop(id(scheduler_output), _NO_PACE)
        if self._goodput is not None:
            self._measure(self._goodput, pace, model_runner_output)
        if self._lengths is not None:
            self._observe(self._lengths, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _measure(self, goodput: Goodput, pace: _Pace, output: ModelRunnerOutput) -> None:
        now = time.perf_counter()
        (before, last), self._last = self._last, (now, pace)
        if not (pace.only_decodes and last.only_decodes):
            return  # prompts cost what they cost, and behind them the engine may have waited
        steady = pace.num_rows == last.num_rows and pace.drafted == pace.drafts == last.drafted == last.drafts
        num_tokens = sum(map(len, output.sampled_token_ids))
        if goodput.observe(pace.num_rows, pace.drafted, now - before, num_tokens, steady=steady):
            with_drafts, without = goodput.speeds(pace.num_rows)
            logger.info(
                "Speculation is %s in batches of about %d: %.1f tokens/s with drafts, %.1f without.",
                "on" if with_drafts > without else "off",
                pace.num_rows,
                with_drafts * pace.num_rows,
                without * pace.num_rows,
            )

    def _observe(self, lengths: Lengths, output: ModelRunnerOutput) -> None:
        num_real: dict[str, int] = getattr(output, "num_real_drafts", None) or {}
        for req_id, num_drafts in num_real.items():
            # One that has ended may have had a step in flight.
            if num_drafts and req_id in self.requests:
                if tokens := output.sampled_token_ids[output.req_id_to_index[req_id]]:
                    lengths.observe(req_id, num_drafts, len(tokens) - 1)


class PacedScheduler(_Paced):
    """Step by step."""


class PacedAsyncScheduler(_Paced, AsyncScheduler):
    """Steps overlap."""


def _only_decodes(scheduled: SchedulerOutput) -> bool:
    cached, drafts = scheduled.scheduled_cached_reqs, scheduled.scheduled_spec_decode_tokens
    if scheduled.scheduled_new_reqs or cached.resumed_req_ids:
        return False
    return all(count == 1 + len(drafts.get(req_id, ())) for req_id, count in scheduled.num_scheduled_tokens.items())

"""The model runner: turns the scheduler's output into sampled tokens. This file is the order of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from vllm_gaudi_spec.drafting.base import Drafting
from vllm_gaudi_spec.outputs import CountedOutput, SpeculativeOutput
from vllm_gaudi_spec.records import DECODE, Batch, NoDraftReason, Planned, Request, SampledRows, StepResult
from vllm_gaudi_spec.runner.batch import make_batch, make_sample_batch, plan_batches
from vllm_gaudi_spec.runner.extensions.pooling import Pooling
from vllm_gaudi_spec.runner.graphs import (
    drafts_signature,
    report_signature,
    sizes_of_report,
)
from vllm_gaudi_spec.runner.parts import RunnerParts
from vllm_gaudi_spec.runner.report import Report, leave_out_scores
from vllm_gaudi_spec.runner.warmup import warm_up
from vllm_gaudi_spec.sampling.params import Branch, Grammar, SamplePass, read_grammars

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput

    from vllm_gaudi_spec.attention.metadata import StepInputs
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.outputs import DrafterStatus, SpecSchedulerOutput
    from vllm_gaudi_spec.records import Drafts, SampleBatch
    from vllm_gaudi_spec.upstream.scheduler_output import GrammarOutput, SchedulerOutput


class ModelRunner(RunnerParts):
    def __init__(self, vllm_config: VllmConfig, backend: DeviceBackend, *, shows_progress: bool) -> None:
        super().__init__(vllm_config, backend, shows_progress=shows_progress)
        self.pending: list[Planned] = []
        self.batches: list[Batch] = []
        self.rows_alone: StepInputs | None = None
        self.report: Report | None = None
        self.drafter_status: DrafterStatus | None = None

    def warm_up(self) -> None:
        max_tokens = self.options.warmup_tokens
        limit = self.backend.traits.warmup_tokens if max_tokens is None else max_tokens
        self.idle_warm_up = warm_up(self, limit)

    # --- a step, in the two halves that vLLM calls ---

    def execute_model(self, scheduled: SpecSchedulerOutput) -> ModelRunnerOutput | None:
        """Prepare and forward. None means that `sample_tokens` returns the result."""
        self.apply(scheduled)
        if not scheduled.total_num_scheduled_tokens:
            if scheduled.warms_up:
                self.idle_warm_up.run_next()
            # vLLM's step after the last requests ended: the next one may be long after it.
            return CountedOutput([], {}, worked=self.recorder.worked(self.backend, is_last=True))
        self.scheduled = scheduled
        lookahead = 0 if self.drafting is None else self.drafting.lookahead
        num_drafts = self.max_scheduled_drafts(scheduled)
        self.pending = plan_batches(scheduled, self.requests, self.shapes, num_drafts, lookahead)
        max_drafts = self.max_drafts_after(scheduled)
        self.batches = [self.make_batch(planned, max_drafts) for planned in self.fit(self.pending)]
        for batch in self.batches:
            self.forward(batch)
        for extension in self.extensions:
            extension.after_forwards(scheduled)
        return None if self.pooling is None else self.pool(self.pooling)

    def pool(self, pooling: Pooling) -> ModelRunnerOutput:
        pending, self.pending = self.pending, []
        self.recorder.step_done()
        output = pooling.report(pending, self.recorder.worked(self.backend))
        self.backend.graphs.step_done()
        return output

    def execute_dummy_batch(self) -> None:
        """Take part in a step of other ranks without requests of this rank."""
        for planned in self.fit([]):
            self.forward(self.make_batch(planned))
        self.backend.graphs.step_done()

    def sample_tokens(self, constraints: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Verify, advance, report, propose."""
        pending, self.pending = self.pending, []
        if not pending:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self.recorder.step_done()
        max_drafts = self.max_drafts_after(self.scheduled)
        self.report = self.finish(pending, read_grammars(constraints, self.scheduled), max_drafts)
        self.report.worker_counts = self.recorder.worked(self.backend)
        self.backend.graphs.step_done()
        return self.report if self.async_scheduling else self.read(self.report, max_drafts)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Drafts that follow the newest step, which the host has read; None where they stay on the device."""
        step = None if self.report is None else self.report.step
        if self.drafting is None or step is None or not self.host_needs_drafts(step.requests):
            return None
        return self.drafting.drafts_of(step)

    # --- the parts of a step ---

    def fit(self, planned: list[Planned]) -> list[Planned]:
        """The batches that this rank runs."""
        for extension in self.extensions:
            planned = extension.fit(planned)
        return planned

    def apply(self, scheduled: SpecSchedulerOutput) -> None:
        """Follow the scheduler: requests that came, went or grew."""
        self.requests.apply(scheduled)
        self.kv_cache.apply(scheduled)
        for extension in self.extensions:
            extension.apply(scheduled, self.requests)
        for request in self.requests.admitted:
            self.sampling.admit(request)
        if self.drafting is not None:
            self.drafting.apply(self.requests)
            self.observe_drafter(self.drafting, scheduled.drafter_status)

    def observe_drafter(self, drafting: Drafting, status: DrafterStatus | None) -> None:
        """Apply the scheduler's decision after faults of the drafter, if there were any."""
        if status is None:
            return
        self.drafter_status = status
        resumed, stopped = ([found for name in names if (found := self.requests.running(name))] for names in status[:2])
        drafting.on_drafter_status(resumed, stopped, is_off=status.is_off)

    def max_scheduled_drafts(self, scheduled: SchedulerOutput) -> dict[str, int]:
        """The most drafts of each request that this step may verify, from the scheduler's output.

        With async scheduling that has placeholders (-1) for drafts that only the device has; otherwise -1 is padding.
        """
        if self.drafting is None:
            return {}
        scheduled_tokens = scheduled.scheduled_spec_decode_tokens
        counts = [
            len(tokens) if self.async_scheduling else len(tokens) - tokens.count(-1)
            for tokens in scheduled_tokens.values()
        ]
        max_drafts = self.drafting.max_drafts([self.requests.by_id[req_id] for req_id in scheduled_tokens], counts)
        return dict(zip(scheduled_tokens, max_drafts.tolist(), strict=True))

    def max_drafts_after(self, scheduled: SpecSchedulerOutput) -> int:
        """The most drafts of a request that may follow this step."""
        num_drafts: int = min(scheduled.num_spec_tokens_to_schedule, self.num_drafts)
        return num_drafts

    def make_batch(self, planned: Planned, max_drafts: int = 0) -> Batch:
        """Copy a planned batch to the device, with what the drafter and the extensions need there."""
        if self.drafting is None or planned.shape.phase != DECODE:
            batch = make_batch(self.requests, planned)
        else:
            limits = self.drafting.limit_drafts(planned.requests, max_drafts)
            batch = make_batch(self.requests, planned, limits, self.drafting.host_drafts(planned.requests))
        for extension in self.extensions:
            batch = extension.add_to(batch)
        return batch

    def compute(self, batch: Batch) -> None:
        self.recorder.saw(batch.shape)
        shape = batch.shape
        self.rows_alone = self.device_step.forward(
            shape.phase, shape.queries, batch.inputs, batch.multimodal, batch.token_types_T
        )

    def forward(self, batch: Batch) -> None:
        """Run the target over a batch, and what reads it before the next one. Padding alone, beside data-parallel peers
        that have work, leaves nothing to read."""
        self.compute(batch)
        if not batch.requests:
            return
        for extension in self.extensions:
            extension.after_forward(batch)
        self.prompt_logprobs.collect(batch, self.recorder.saw)
        if self.drafting is not None:
            self.drafting.follow(batch)

    def finish(self, pending: list[Planned], grammars: dict[str, Grammar], max_drafts: int) -> Report:
        """One sampling pass over all requests that sample, whatever batch computed them. A prompt's last position is a
        verify of zero drafts."""
        finishing = [member for batch in pending for member in batch.finishing()]
        unfinished = [request for batch in pending for request in batch.continuing()]
        if not finishing:
            return self.send(StepResult([], unfinished=unfinished))
        requests, ends = [request for request, _ in finishing], [end for _, end in finishing]
        num_positions = [count for batch in pending for count in batch.num_positions()]
        num_queries = max(batch.num_sampled for batch in pending)
        branch = self.sampling.branch(requests, grammars)
        shape = self.sample_shapes.fit(num_queries, num_positions, branch)
        batch = make_sample_batch(self.requests, shape, requests, num_positions)
        sample_pass = self.sampling.make_pass(batch, branch, grammars)
        step = self.sample(batch, sample_pass)
        if not self.sampling.reports(requests, branch):
            leave_out_scores(step, batch.shape)
        step.unfinished = unfinished
        step.started = [request for request in requests if request.num_computed < len(request.all_token_ids)]
        step.prompt_logprobs = self.prompt_logprobs.take(requests)
        if self.drafting is None:
            return self.send(step)
        is_one_decode = len(self.batches) == 1 and self.batches[0].shape.phase == DECODE
        sampled = SampledRows(
            requests=requests,
            ends=ends,
            num_queries=num_queries,
            decode=self.batches[0] if is_one_decode else None,
            rows_alone=self.rows_alone if is_one_decode else None,
        )
        return self.send_and_propose(step, self.drafting, sampled, branch, max_drafts)

    def sample(self, batch: SampleBatch, sample_pass: SamplePass) -> StepResult:
        self.recorder.saw(self.sampling.signature(batch.shape, sample_pass.branch))
        verification, rows_B = self.device_step.finish(sample_pass)
        signature = sizes_of_report(batch.shape, sample_pass.branch)
        return StepResult(batch.requests, verification, rows_B, signature=signature)

    def send_and_propose(
        self,
        step: StepResult,
        drafting: Drafting,
        sampled: SampledRows,
        branch: Branch,
        max_drafts: int,
    ) -> Report:
        """Send tokens to the host before drafts are computed, so that no token waits for the drafter. Where the host
        needs the drafts too, both are sent after drafting in one copy: a step has one device-to-host sync."""
        report = None if self.host_needs_drafts(sampled.requests) else self.send(step)
        drafts_follow = drafting.propose(sampled, branch, max_drafts)
        step.draft_rounds = drafting.take_rounds()
        if report is None:
            if drafts_follow:
                step.drafts = self.drafts_after(step)
            report = self.send(step)
        return report

    def drafts_after(self, step: StepResult) -> Drafts:
        """The drafts of rows that sampled, for the host."""
        assert step.rows_B is not None
        self.recorder.saw(drafts_signature(len(step.rows_B)))
        return self.device_step.drafts(step.rows_B, self.num_drafts)

    def host_needs_drafts(self, requests: list[Request]) -> bool:
        """Without async scheduling vLLM's scheduler takes the drafts of every step. With it drafts stay on the device,
        unless a grammar has to check them before they are verified."""
        return not self.async_scheduling or any(request.params.structured_outputs for request in requests)

    def send(self, step: StepResult) -> Report:
        if step.verification is not None:
            self.recorder.saw(report_signature(step.signature, has_drafts=step.drafts is not None))
        return self.reports.send(step)

    def read(self, report: Report, max_drafts: int) -> ModelRunnerOutput:
        """Wait for a step's results, then run drafters that work on the host."""
        output = report.get_output()
        step = report.step
        assert step is not None
        for extension in self.extensions:
            extension.after_read(step.requests, output.sampled_token_ids)
        if self.drafting is not None:
            outgrown = self.drafting.outgrown()
            self.drafting.propose_on_host(step, max_drafts)
            if isinstance(output, SpeculativeOutput):
                output.why.update(dict.fromkeys(outgrown, NoDraftReason.LENGTH))
                output.draft_rounds += self.drafting.take_rounds()
        return output

    def step_report(self) -> dict[str, object]:
        in_use = self.requests.in_use() | (self.drafting.in_use() if self.drafting is not None else {})
        report = self.recorder.report(self.backend.memory.num_host_syncs) | {
            "device": self.backend.graphs.counts(),
            "in_use": in_use,
        }
        if self.drafting is not None:
            status = self.drafter_status
            report["drafter"] = {"faults": status.num_faults if status else 0, "off": bool(status and status.is_off)}
        return report

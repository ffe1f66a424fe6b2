"""The model runner, which turns scheduler outputs into sampled tokens. This module defines the order of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_spec.graphs import drafts_signature, report_sizes
from vllm_gaudi_spec.outputs import CountedOutput, DrafterStatus, SpeculativeOutput
from vllm_gaudi_spec.records import DECODE, PREFILL, Batch, NoDraftReason, Planned, Request, SampledRows, StepResult
from vllm_gaudi_spec.runner.parts import RunnerParts
from vllm_gaudi_spec.runner.planning import list_continuing, list_finishing, make_sample_batch, plan_batches
from vllm_gaudi_spec.runner.report import Report, drop_scores
from vllm_gaudi_spec.sampling.branches import Branch
from vllm_gaudi_spec.sampling.grammars import Grammar, read_grammars
from vllm_gaudi_spec.sampling.params import SamplePass

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.outputs import SpecSchedulerOutput
    from vllm_gaudi_spec.records import Drafts, SampleBatch
    from vllm_gaudi_spec.runner.extensions.pooling import Pooling
    from vllm_gaudi_spec.upstream.scheduler import GrammarOutput, SchedulerOutput


class ModelRunner(RunnerParts):
    """Runs the steps of a worker."""

    def __init__(self, vllm_config: VllmConfig, backend: DeviceBackend, *, shows_progress: bool) -> None:
        super().__init__(vllm_config, backend, shows_progress=shows_progress)
        self.pending: list[Planned] = []
        self.batches: list[Batch] = []
        self.report: Report | None = None
        self.drafter_status = DrafterStatus((), (), is_off=False, num_faults=0)

    # --- a step, split into the two halves that vLLM calls ---

    def execute_model(self, scheduled: SpecSchedulerOutput) -> ModelRunnerOutput | None:
        """Prepare and run the forward passes. Returns None if `sample_tokens` will return the output of the step."""
        self.apply(scheduled)
        for extension in self.extensions:
            extension.before_forwards(scheduled)
        if not scheduled.total_num_scheduled_tokens:
            # vLLM runs this step after the last request has ended. It may be a long time before the next step.
            idle = CountedOutput([], {}, worked=self.recorder.make_counts(self.backend, is_last=True))
            self.end_step(idle)
            return idle
        self.scheduled = scheduled
        num_drafts = self.max_scheduled_drafts(scheduled)
        pending = plan_batches(scheduled, self.requests, self.shapes, num_drafts, self.drafting.lookahead)
        max_drafts = self.max_drafts_after(scheduled)
        self.batches = [self.make_batch(planned, max_drafts) for planned in self.fit(pending)]
        for batch in self.batches:
            if batch.shape.phase == PREFILL:
                num_tokens = sum(batch.counts)
                num_computed = batch.shape.tokens if self.shapes.computes_padding else num_tokens
                self.recorder.count_prefill(num_tokens, num_computed)
            self.forward(batch)
        for extension in self.extensions:
            extension.after_forwards(scheduled)
        self.pending = pending
        return None if self.pooling is None else self.pool(self.pooling)

    def pool(self, pooling: Pooling) -> ModelRunnerOutput:
        pending, self.pending = self.pending, []
        self.recorder.step_done()
        output = pooling.report(pending, self.recorder.make_counts(self.backend))
        self.batches = []  # batches contain encoder outputs that vLLM may free
        self.backend.graphs.step_done()
        return output

    def execute_dummy_batch(self) -> None:
        """Take part in a step of data-parallel peers while this rank has no requests."""
        for planned in self.fit([]):
            self.forward(self.make_batch(planned))
        self.backend.graphs.step_done()

    def sample_tokens(self, constraints: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Verify drafts, advance requests, report results, and propose new drafts.

        Return None if `execute_model` failed. vLLM, which may not have seen that error yet, then raises it.
        """
        pending, self.pending = self.pending, []
        if not pending:
            return None
        self.recorder.step_done()
        max_drafts = self.max_drafts_after(self.scheduled)
        grammars = {} if constraints is None else read_grammars(constraints, self.scheduled)
        self.report = self.finish(pending, grammars, max_drafts)
        self.report.worker_counts = self.recorder.make_counts(self.backend)
        self.end_step(self.report)
        self.batches = []
        self.backend.graphs.step_done()
        return self.report if self.async_scheduling else self.read(self.report, max_drafts)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the drafts after the latest step that the host has read, if a grammar must check them."""
        report = self.report
        if not self.async_scheduling or report is None or report.step is None:
            return None  # without async scheduling, the step's output contains its drafts
        if not self.host_needs_drafts(report.step.requests):
            return None
        return self.drafting.get_draft_token_ids(report.step)

    # --- parts of a step ---

    def end_step(self, output: ModelRunnerOutput | Report) -> None:
        for extension in self.extensions:
            extension.end_step(output)

    def fit(self, planned: list[Planned]) -> list[Planned]:
        """Return the batches that this rank runs."""
        for extension in self.extensions:
            planned = extension.fit(planned)
        return planned

    def apply(self, scheduled: SpecSchedulerOutput) -> None:
        """Apply the scheduler's output: requests that were admitted, have ended, or continue."""
        self.requests.apply(scheduled)
        # vLLM requests zeroed blocks only for layers that store state in KV blocks, and such layers are not supported.
        assert not scheduled.new_block_ids_to_zero
        if copies := scheduled.kv_cache_block_copies:
            self.kv_cache.copy_blocks([(copy.src_block_id, copy.dst_block_id) for copy in copies])
        for extension in self.extensions:
            extension.apply(scheduled, self.requests)
        if self.pooling is None and self.requests.admitted:
            for request in self.requests.admitted:
                self.sampling.admit(request)
            # Flush here, so that the values of a row are set even if its request never samples.
            self.sampling.flush()
        self.drafting.apply(self.requests)
        if (status := scheduled.drafter_status) is not None:
            self.drafter_status = status
            restarted, excluded = (self.requests.find_running(names) for names in status[:2])
            self.drafting.update_drafter_state(restarted, excluded, disabled=status.is_off)

    def max_scheduled_drafts(self, scheduled: SchedulerOutput) -> dict[str, int]:
        """Return the maximum number of drafts that this step may verify for each request.

        With async scheduling, a -1 in the scheduler's output is a placeholder for a draft that exists only on the
        device. Without async scheduling, -1 is padding, and every pipeline stage verifies all other drafts.
        """
        by_id = scheduled.scheduled_spec_decode_tokens
        if not self.async_scheduling:
            return {req_id: len(tokens) - tokens.count(-1) for req_id, tokens in by_id.items()}
        counts = [*map(len, by_id.values())]
        max_drafts = self.drafting.cap_scheduled_drafts([self.requests.by_id[req_id] for req_id in by_id], counts)
        return dict(zip(by_id, max_drafts.tolist(), strict=True))

    def max_drafts_after(self, scheduled: SpecSchedulerOutput) -> int:
        """Return the maximum number of drafts per request that may follow this step."""
        num_drafts: int = min(scheduled.num_spec_tokens_to_schedule, self.num_drafts)
        return num_drafts

    def make_batch(self, planned: Planned, max_drafts: int = 0) -> Batch:
        """Copy a planned batch to the device, with the inputs that the drafter and the extensions need."""
        if planned.shape.phase == DECODE:
            batch = self.requests.make_batch(planned, max_drafts, self.drafting.host_drafts(planned.requests))
        else:
            batch = self.requests.make_batch(planned)
        for extension in self.extensions:
            batch = extension.add_to(batch)
        return batch

    def compute(self, batch: Batch) -> torch.Tensor | None:
        """Run the target on a batch. Return its output if it is for the next pipeline stage."""
        self.recorder.saw(batch.shape)
        shape, inputs = batch.shape, (batch.inputs, batch.multimodal, batch.token_types_T, batch.received_TW)
        from_start = self.shapes.begins_at_start(shape)
        return self.device_step.forward(shape.phase, shape.queries, from_start, *inputs)

    def forward(self, batch: Batch) -> None:
        """Run the target on a batch, and then everything that reads its hidden states before the next forward pass."""
        self.compute(batch)
        if not batch.requests:  # a forward pass that only data-parallel peers need
            return
        for extension in self.extensions:
            extension.after_forward(batch)
        self.drafting.follow(batch)

    def finish(self, pending: list[Planned], grammars: dict[str, Grammar], max_drafts: int) -> Report:
        """Sample in one pass for all requests that sample in this step, regardless of which batch computed them.

        The last position of a prompt is treated as a verification of zero drafts.
        """
        finishing = [member for planned in pending for member in list_finishing(planned)]
        unfinished = [request for planned in pending for request in list_continuing(planned)]
        if not finishing:
            return self.reports.send(StepResult([], unfinished=unfinished))
        requests, ends, num_positions = map(list, zip(*finishing, strict=True))
        num_queries = max((planned.shape.queries for planned in pending if planned.shape.phase == DECODE), default=1)
        branch = self.sampling.branch(requests, grammars)
        shape = self.sample_shapes.fit(num_queries, num_positions, branch)
        batch = make_sample_batch(self.requests, shape, requests, num_positions)
        pass_drafts = self.drafting.choose_pass_drafts(max_drafts)
        step = self.sample(batch, self.sampling.make_pass(batch, branch, grammars, *pass_drafts))
        if not self.sampling.reports(requests, branch):
            drop_scores(step, batch.shape)
        step.unfinished = unfinished
        step.started = [request for request in requests if request.num_computed < len(request.all_token_ids)]
        for extension in self.extensions:
            extension.add_to_result(step)
        is_one_decode = len(self.batches) == 1 and self.batches[0].shape.phase == DECODE
        decode = self.batches[0] if is_one_decode else None
        sampled = SampledRows(requests=requests, ends=ends, num_queries=num_queries, decode=decode)
        return self.send_and_propose(step, sampled, branch, max_drafts)

    def sample(self, batch: SampleBatch, sample_pass: SamplePass) -> StepResult:
        self.recorder.saw((*batch.shape, sample_pass.branch, sample_pass.num_drafts))
        verification, rows_B, drafts, packed = self.device_step.finish(sample_pass)
        signature = report_sizes(batch.shape, sample_pass.branch)
        return StepResult(batch.requests, verification, rows_B, packed, signature=signature, drafts=drafts)

    def send_and_propose(self, step: StepResult, sampled: SampledRows, branch: Branch, max_drafts: int) -> Report:
        """Send the sampled tokens to the host before the drafter runs, so that clients do not wait for drafting.

        If the host also needs the drafts, tokens and drafts are sent in one copy after drafting, so that the step still
        has only one device-to-host sync.
        """
        is_complete = step.drafts is not None or not self.host_needs_drafts(sampled.requests)
        report = self.reports.send(step) if is_complete else None
        drafts_follow = self.drafting.propose(sampled, branch, max_drafts)
        step.draft_rounds = self.drafting.take_rounds()
        if report is not None:
            return report
        if drafts_follow:
            step.drafts, step.packed = self.drafts_after(step), None
        return self.reports.send(step)

    def drafts_after(self, step: StepResult) -> Drafts:
        """Return the drafts of the rows that sampled, as device tensors that can be sent to the host."""
        assert step.rows_B is not None
        self.recorder.saw(drafts_signature(len(step.rows_B)))
        return self.device_step.drafts(step.rows_B, self.num_drafts)

    def host_needs_drafts(self, requests: list[Request]) -> bool:
        """Whether vLLM's scheduler needs the drafts generated in this step.

        With synchronous scheduling, it always does. With async scheduling, drafts stay on the device, unless a grammar
        must check them before verification.
        """
        return not self.async_scheduling or any(request.params.structured_outputs for request in requests)

    def read(self, report: Report, max_drafts: int) -> ModelRunnerOutput:
        """Wait for the results of a step, and then run the drafter if it runs on the host."""
        output = report.get_output()
        step = report.step
        assert step is not None
        for extension in self.extensions:
            extension.after_read(step.requests, output.sampled_token_ids)
        outgrown = self.drafting.find_outgrown_requests()
        self.drafting.propose_on_host(step, max_drafts)
        if isinstance(output, SpeculativeOutput):
            output.why.update(dict.fromkeys(outgrown, NoDraftReason.LENGTH))
            output.draft_rounds += self.drafting.take_rounds()
            output.draft_token_ids = self.drafting.get_draft_token_ids(step)
        return output

    def step_report(self) -> dict[str, object]:
        report = self.recorder.report(self.backend.memory.num_host_syncs) | {
            "device": self.backend.graphs.counts(),
            "in_use": self.requests.in_use() | self.drafting.in_use(),
        }
        if self.speculation is not None:
            report["drafter"] = {"faults": self.drafter_status.num_faults, "off": self.drafter_status.is_off}
        return report

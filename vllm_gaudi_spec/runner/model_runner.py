"""The model runner: loads the target, owns the requests, and turns the scheduler's word into sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from vllm_gaudi_spec.config import Options
from vllm_gaudi_spec.runner import prompt_logprobs
from vllm_gaudi_spec.runner.batch import Batch, build_inputs
from vllm_gaudi_spec.runner.custom_processors import CustomProcessors
from vllm_gaudi_spec.runner.kv_cache import KVCache
from vllm_gaudi_spec.runner.recorder import StepRecorder
from vllm_gaudi_spec.runner.report import Report, Step
from vllm_gaudi_spec.runner.requests import Requests
from vllm_gaudi_spec.runner.sampling import Sampling, sample
from vllm_gaudi_spec.runner.schedule import plan_batches
from vllm_gaudi_spec.runner.shapes import Shapes
from vllm_gaudi_spec.runner.target_model import TargetModel
from vllm_gaudi_spec.runner.warmup import warm_up
from vllm_gaudi_spec.sample.strict import verify

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

    from vllm_gaudi_spec.backends.base import DeviceBackend


@dataclass(frozen=True, slots=True)
class Forwarded:
    batch: Batch
    hidden_TH: torch.Tensor


class ModelRunner:
    def __init__(self, vllm_config: VllmConfig, backend: DeviceBackend, *, shows_progress: bool) -> None:
        self.vllm_config = vllm_config
        self.backend = backend
        self.options = Options.from_vllm(vllm_config)
        self.shows_progress = shows_progress
        self.recorder = StepRecorder()
        self.max_rows = vllm_config.scheduler_config.max_num_seqs
        self.num_drafts = 0
        self.pending: list[Forwarded] = []
        self.scheduled: SchedulerOutput | None = None

    # --- start-up ---

    def load_model(self) -> None:
        self.target = TargetModel(self.vllm_config, self.backend)

    def kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.target.kv_cache_spec()

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        model = self.vllm_config.model_config
        device = self.backend.torch_device
        self.shapes = Shapes.from_config(self.vllm_config, self.options, self.backend, self.num_drafts)
        self.kv_cache = KVCache(kv_cache_config, self.vllm_config, device)
        self.target.bind_groups(self.kv_cache.layer_groups)
        self.requests = Requests(
            self.backend,
            max_rows=self.max_rows,
            max_len=self.shapes.max_context + 1 + self.num_drafts,
            block_sizes=self.kv_cache.block_sizes,
            max_context=self.shapes.max_context,
            seed=model.seed,
        )
        self.sampling = Sampling(
            self.backend, self.max_rows, model.get_vocab_size(), model.max_logprobs, model.logprobs_mode
        )
        self.custom = CustomProcessors.load(self.vllm_config, device, self.max_rows)

    def warm_up(self) -> None:
        given = self.options.warmup_tokens
        warm_up(self, self.shapes, self.backend.warmup_tokens if given is None else given)

    # --- a step, in the two halves that vLLM calls ---

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        """Prepare and forward. None means that `sample_tokens` has the result."""
        self.apply(scheduled)
        if not scheduled.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        batches = plan_batches(scheduled, self.requests, self.shapes)
        self.pending = [self.forward(batch) for batch in batches]
        return None

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Verify, advance, report."""
        pending, self.pending = self.pending, []
        if not pending:
            return EMPTY_MODEL_RUNNER_OUTPUT
        masks = _masks_by_request(grammar)
        self.recorder.step_done()
        report = Report([self.finish(done, masks) for done in pending], self.backend)
        if self.vllm_config.scheduler_config.async_scheduling:
            return report
        return report.get_output()

    def apply(self, scheduled: SchedulerOutput) -> None:
        self.requests.apply(scheduled)
        self.kv_cache.apply(scheduled)
        for request in self.requests.admitted:
            self.sampling.admit(request)
        if self.custom is not None:
            self.custom.update(self.requests.freed_rows, self.requests.admitted)

    def forward(self, batch: Batch) -> Forwarded:
        self.recorder.saw(batch.shape)
        return Forwarded(batch, self.target.forward(build_inputs(batch, self.requests)))

    def finish(self, done: Forwarded, masks: dict[str, np.ndarray]) -> Step:
        """Verify, advance. A prompt's last position is a verify of zero drafts; an unfinished one only moves on."""
        batch = done.batch
        prompt_logprobs.collect(batch, done.hidden_TH, self.target, self.sampling.logprobs_mode)
        if batch.requests and not any(batch.finishes):
            return Step(batch)
        hidden, positions_BQ = batch.select_sampled(done.hidden_TH)
        inputs = self.sampling.prepare(batch, positions_BQ.shape[1], masks)
        self.recorder.saw((*positions_BQ.shape, inputs.branch))
        logits_BQV = self.target.logits(hidden).view(*positions_BQ.shape, -1)
        sampled = sample(
            logits_BQV,
            positions_BQ,
            batch.rows_B,
            self.requests,
            inputs,
            self.custom,
            self.sampling.logprobs_mode,
        )
        verdict = verify(sampled.tokens_BQ, *batch.drafts(self.requests, positions_BQ))
        self.requests.advance(batch.rows_B, positions_BQ[:, 0], batch.samples_B, verdict)
        return Step(batch, verdict, sampled.logprobs, sampled.scores, prompt_logprobs.take_finished(batch))

    def step_report(self) -> dict[str, object]:
        return self.recorder.report(self.backend.num_host_reads)


def _masks_by_request(grammar: GrammarOutput | None) -> dict[str, np.ndarray]:
    """Each constrained request's rows of the bitmask; without drafts there is one row a request."""
    if grammar is None:
        return {}
    return {
        req_id: grammar.grammar_bitmask[index : index + 1]
        for index, req_id in enumerate(grammar.structured_output_request_ids)
    }

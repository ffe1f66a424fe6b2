"""The model runner: loads the target, owns the requests, and turns the scheduler's word into sampled tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from vllm_gaudi_spec.config import Options
from vllm_gaudi_spec.runner import prompt_logprobs
from vllm_gaudi_spec.runner.batch import Batch, build_inputs, make_sample_batch
from vllm_gaudi_spec.runner.custom_processors import CustomProcessors
from vllm_gaudi_spec.runner.kv_cache import KVCache
from vllm_gaudi_spec.runner.landing import Landing
from vllm_gaudi_spec.runner.recorder import StepRecorder
from vllm_gaudi_spec.runner.report import Report, Step
from vllm_gaudi_spec.runner.requests import Request, Requests
from vllm_gaudi_spec.runner.sampling import Sampling, sample
from vllm_gaudi_spec.runner.schedule import plan_batches
from vllm_gaudi_spec.runner.shapes import Shapes
from vllm_gaudi_spec.runner.target_model import TargetModel
from vllm_gaudi_spec.runner.warmup import warm_up
from vllm_gaudi_spec.sample.strict import verify

if TYPE_CHECKING:
    import numpy as np
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

    from vllm_gaudi_spec.backends.base import DeviceBackend


class ModelRunner:
    def __init__(self, vllm_config: VllmConfig, backend: DeviceBackend, *, shows_progress: bool) -> None:
        self.vllm_config = vllm_config
        self.backend = backend
        self.options = Options.from_vllm(vllm_config)
        self.shows_progress = shows_progress
        self.recorder = StepRecorder()
        self.max_rows = vllm_config.scheduler_config.max_num_seqs
        self.num_drafts = 0
        self.pending: list[Batch] = []

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
        self.landing = Landing(self.max_rows + 1, 1 + self.num_drafts, device)
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
        self.pending = plan_batches(scheduled, self.requests, self.shapes)
        for batch in self.pending:
            self.forward(batch)
        return None

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample, verify, advance, report."""
        pending, self.pending = self.pending, []
        if not pending:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self.recorder.step_done()
        finishing = [request for batch in pending for request in batch.finishing()]
        step = self.finish(finishing, _masks_by_request(grammar)) if finishing else Step([])
        step.unfinished = [request for batch in pending for request in batch.continuing()]
        report = Report(step, self.backend)
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

    def forward(self, batch: Batch) -> None:
        self.recorder.saw(batch.shape)
        hidden_TH = self.target.forward(build_inputs(batch, self.requests))
        prompt_logprobs.collect(batch, hidden_TH, self.target, self.sampling)
        self.landing.put(batch, hidden_TH)
        # What samples moves on in `finish`; this is for prompts that go on in a later step.
        self.requests.set_computed(batch.rows_B, batch.starts_B + batch.num_real_B)

    def finish(self, finishing: list[Request], masks: dict[str, np.ndarray], num_rows: int | None = None) -> Step:
        """One sampling pass over all rows that sample. A prompt's last position is a verify of zero drafts."""
        num_rows = self.shapes.fit_rows(len(finishing)) if num_rows is None else num_rows
        batch = make_sample_batch(self.requests, num_rows, 1, finishing)
        hidden, positions_BQ = self.landing.take(batch.rows_B, batch.num_queries)
        inputs = self.sampling.prepare(batch, masks)
        self.recorder.saw(self.sampling.signature(batch, inputs.branch))
        logits_BQV = self.target.logits(hidden).view(*positions_BQ.shape, -1)
        sampled = sample(
            logits_BQV, positions_BQ, batch.rows_B, self.requests, inputs, self.custom, self.sampling.logprobs_mode
        )
        drafts_BK = self.requests.tokens_at(batch.rows_B, positions_BQ[:, 1:])
        verdict = verify(sampled.tokens_BQ, drafts_BK, batch.num_drafts_B)
        self.requests.advance(batch.rows_B, positions_BQ[:, 0], verdict)
        return Step(finishing, verdict, sampled.logprobs, sampled.scores, prompt_logprobs.take(finishing))

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

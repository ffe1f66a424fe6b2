"""The model runner: loads the target, owns the requests, and turns the scheduler's output into sampled tokens."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from vllm_gaudi_spec.config import Options, Speculation, ranks_in_step
from vllm_gaudi_spec.drafting.base import Drafting, DraftingContext
from vllm_gaudi_spec.drafting.load import load_drafting
from vllm_gaudi_spec.drafting.memory import block_of, drafting_bytes
from vllm_gaudi_spec.drafting.models import kv_beside_target, load_drafter
from vllm_gaudi_spec.lora.adapters import Adapters
from vllm_gaudi_spec.outputs import CountedOutput, SpeculativeOutput
from vllm_gaudi_spec.quantization.models import Quantization
from vllm_gaudi_spec.records import DECODE, Batch, NoDraftReason, Planned, Request, SampledRows, StepResult
from vllm_gaudi_spec.recurrent.table import num_pending, num_snapshots, snapshots_of, states_of
from vllm_gaudi_spec.runner.batch import make_batch, make_sample_batch, plan_batches
from vllm_gaudi_spec.runner.data_parallel import DataParallelLockstep
from vllm_gaudi_spec.runner.device_step import DeviceStep
from vllm_gaudi_spec.runner.encoders import Encoders
from vllm_gaudi_spec.runner.graphs import (
    StepRecorder,
    drafts_signature,
    report_signature,
    sizes_of_report,
)
from vllm_gaudi_spec.runner.hidden_states import HiddenStateBuffer
from vllm_gaudi_spec.runner.kv_cache import KVCache, of_one_forward
from vllm_gaudi_spec.runner.media_store import MediaStore
from vllm_gaudi_spec.runner.model import LoadedModel
from vllm_gaudi_spec.runner.multimodal import Multimodal
from vllm_gaudi_spec.runner.pooling import Pooling, output_of
from vllm_gaudi_spec.runner.prompt_embeds import PromptEmbeds
from vllm_gaudi_spec.runner.report import Downloads, PromptLogprobs, Report, Reports, leave_out_scores
from vllm_gaudi_spec.runner.requests import Requests
from vllm_gaudi_spec.runner.sample_shapes import SampleShapes
from vllm_gaudi_spec.runner.shapes import Shapes
from vllm_gaudi_spec.runner.snapshots import SnapshotRows
from vllm_gaudi_spec.runner.warmup import warm_up
from vllm_gaudi_spec.sampling.custom_processors import CustomProcessors
from vllm_gaudi_spec.sampling.params import Branch, Grammar, SamplePass, Sampling, read_grammars
from vllm_gaudi_spec.sampling.verify import choose_rule, needs_rectangle

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput

    from vllm_gaudi_spec.attention.metadata import StepInputs
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.outputs import DrafterStatus, SpecSchedulerOutput
    from vllm_gaudi_spec.records import Drafts, SampleBatch
    from vllm_gaudi_spec.upstream.kv_cache import KVCacheConfig, KVCacheSpec
    from vllm_gaudi_spec.upstream.scheduler_output import GrammarOutput, SchedulerOutput


class ModelRunner:
    def __init__(self, vllm_config: VllmConfig, backend: DeviceBackend, *, shows_progress: bool) -> None:
        self.vllm_config = vllm_config
        self.backend = backend
        self.options = Options.from_vllm(vllm_config)
        self.shows_progress = shows_progress
        self.recorder = StepRecorder()
        self.max_rows = vllm_config.scheduler_config.max_num_seqs
        self.speculation = Speculation.from_vllm(vllm_config)
        self.num_drafts = self.speculation.num_drafts if self.speculation else 0
        self.num_snapshots = num_snapshots(vllm_config, self.options.state_snapshots)
        self.async_scheduling = vllm_config.scheduler_config.async_scheduling
        self.pending: list[Planned] = []
        self.batches: list[Batch] = []
        self.rows_alone: StepInputs | None = None
        self.report: Report | None = None
        self.drafter_status: DrafterStatus | None = None

    # --- start-up ---

    def load_model(self) -> None:
        self.drafter: LoadedModel | None = None
        quantization = Quantization.of_target(self.vllm_config)
        self.target = LoadedModel(self.vllm_config, self.backend, quantization=quantization)
        if self.speculation is not None:
            self.drafter = load_drafter(self.speculation, self.vllm_config, self.backend, self.target)
        self.encoders: Encoders | None = None
        if self.vllm_config.model_config.supports_multimodal_inputs and self.backend.traits.captures:
            self.encoders = Encoders(self.vllm_config, self.target.model)
        if self.vllm_config.lora_config is not None:  # last: a head shares the target's layers without adapters
            self.target.adapters = Adapters(self.vllm_config, self.target.model, self.backend)

    def save_measurements(self) -> None:
        """Write the measurements so far of models that are measured."""
        for loaded in (self.target, self.drafter):
            if loaded is not None and loaded.measuring is not None:
                loaded.measuring.write()

    def bytes_beside_kv(self) -> dict[str, int]:
        """Memory that is taken besides weights and the KV cache, by purpose."""
        speculation, taken = self.speculation, {}
        if num_bytes := self.target.state_bytes(self.max_rows + 1, num_pending(self.num_drafts)):
            taken[states_of(self.max_rows)] = num_bytes
        if num_bytes := self.target.state_bytes(self.num_snapshots, num_pending(self.num_drafts)):
            taken[snapshots_of(self.num_snapshots)] = num_bytes
        if self.encoders is not None:
            taken["outputs of image encoders"] = self.encoders.num_bytes
        if self.drafter is None or speculation is None:
            return taken
        kv_region_block = block_of(self.drafter.kv_cache_spec()) if speculation.retokenizes else None
        vocab_size = self.vllm_config.model_config.get_vocab_size()
        return taken | drafting_bytes(speculation, self.max_rows, vocab_size, kv_region_block)

    def kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.target.kv_cache_spec() | kv_beside_target(self.speculation, self.drafter)

    @property
    def _has_kv_region(self) -> bool:
        """Whether the drafter's KV is apart from the target's blocks, in a `DrafterKVRegion`, which binds it."""
        return self.speculation is not None and self.speculation.retokenizes

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *, profiled_blocks: int | None = None) -> None:
        """`profiled_blocks`: for a profile run, the number of blocks that sizes are made for. Drafters on the host are
        not in it, and no processor of a user's is made."""
        model = self.vllm_config.model_config
        device = self.backend.traits.torch_device
        if encodes := self.target.encoder_kv_spec(self.backend.traits.block_size):
            shapes = Shapes.from_config(self.vllm_config, self.options, self.backend, 0)
            max_rows = max(shapes.most_rows, *shapes.prefill_rows)
            kv_cache_config = of_one_forward(encodes, max_tokens=shapes.largest_prefill, max_rows=max_rows)
        self.kv_cache = KVCache(kv_cache_config, self.vllm_config, self.backend)
        self.shapes = Shapes.from_config(
            self.vllm_config,
            self.options,
            self.backend,
            self.num_drafts,
            block_size=min(self.kv_cache.block_sizes, default=None),
            num_blocks=profiled_blocks or self.kv_cache.num_blocks,
        )
        self.target.bind_kv(self.kv_cache.by_layer, self.kv_cache.layer_groups)
        self.target.make_states(self.max_rows + 1, self.num_snapshots, num_pending(self.num_drafts), device)
        if self.drafter is not None and not self._has_kv_region:
            self.drafter.bind_kv(self.kv_cache.by_layer, self.kv_cache.layer_groups)
        self.requests = Requests(
            self.backend,
            max_rows=self.max_rows,
            max_len=self.shapes.max_context + 1 + self.num_drafts,
            block_sizes=self.kv_cache.block_sizes,
            windows=self.kv_cache.windows,
            in_flight=3 * (1 + self.num_drafts),
            max_context=self.shapes.max_context,
            seed=model.seed,
            keeps_kv=not encodes,
        )
        self.snapshots: SnapshotRows | None = None
        if self.num_snapshots and self.target.states is not None:
            self.snapshots = SnapshotRows(self.target.states, self.requests, self.backend)
        self.multimodal: Multimodal | None = None
        if model.supports_multimodal_inputs:
            store = None if self.encoders is None else MediaStore(self.encoders, self.backend, self.recorder)
            self.target.media_SW = None if store is None else store.rows_SW
            self.multimodal = Multimodal(model, self.target.model, self.backend, store)
        self.prompt_embeds: PromptEmbeds | None = None
        if model.enable_prompt_embeds:
            self.prompt_embeds = PromptEmbeds(model, self.target.model, self.backend)
        self.custom: CustomProcessors | None = None
        if profiled_blocks is None:
            self.custom = CustomProcessors.load(self.vllm_config, device, self.max_rows)
        self.sampling = Sampling(
            self.backend,
            max_rows=self.max_rows,
            vocab_size=model.get_vocab_size(),
            max_logprobs=model.max_logprobs,
            logprobs_mode=model.logprobs_mode,
            by_rows=needs_rectangle(self.speculation, Branch(random=True)),
        )
        self.sample_shapes = SampleShapes(
            self.shapes,
            max_rows=self.max_rows,
            # Custom processors may do anything on the host, so they are not captured, and index logits by row.
            lists=self.backend.traits.compiles and self.custom is None,
            needs_rectangle=partial(needs_rectangle, self.speculation),
        )
        self.lockstep: DataParallelLockstep | None = None
        if ranks_in_step(self.vllm_config) > 1:
            # One decode, and at most a chunk of each request.
            self.lockstep = DataParallelLockstep(self.shapes, max_forwards=1 + self.max_rows)
        states_size, states_dtype = output_of(self.target.model, model)
        self.hidden_states = HiddenStateBuffer(
            num_rows=self.max_rows + 1,
            num_queries=1 + self.num_drafts,
            max_chunk_tokens=self.shapes.largest_prefill,
            hidden_size=states_size,
            dtype=states_dtype,
            device=device,
            carried_size=self.target.carried_size,
        )
        self.pooling: Pooling | None = None
        if model.runner_type == "pooling":
            self.pooling = Pooling(self.target.model, self.hidden_states, self.backend.memory)
        downloads = Downloads(self.backend, overlap=self.async_scheduling)
        self.prompt_logprobs = PromptLogprobs(
            self.target, self.hidden_states.chunk_TH, self.sampling, self.backend, downloads
        )
        self.reports = Reports(self.backend, downloads)
        self.drafting: Drafting | None = None
        if self.speculation is not None and (profiled_blocks is None or self.speculation.needs_device):
            self.drafting = load_drafting(
                DraftingContext(
                    speculation=self.speculation,
                    vllm_config=self.vllm_config,
                    requests=self.requests,
                    recorder=self.recorder,
                    shapes=self.shapes,
                    kv_cache=self.kv_cache,
                    hidden_states=self.hidden_states,
                    target=self.target,
                    drafter=self.drafter,
                    sampling=self.sampling,
                )
            )
        self.device_step = DeviceStep(
            self.backend,
            target=self.target,
            requests=self.requests,
            hidden_states=self.hidden_states,
            sampling=self.sampling,
            rule=choose_rule(self.speculation, self.backend),
            drafting=self.drafting,
            custom=self.custom,
        )

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
        planned = self.lockstep.fit(self.pending) if self.lockstep else self.pending
        max_drafts = self.max_drafts_after(scheduled)
        self.batches = [self.make_batch(one, max_drafts) for one in planned]
        for batch in self.batches:
            if batch.requests:
                self.forward(self.with_inputs_beside_tokens(batch))
            else:  # Data-parallel peers have work in this forward.
                self.compute(batch)
        if self.snapshots is not None:
            self.snapshots.save(scheduled.state_saves)
        return None if self.pooling is None else self.pool(self.pooling)

    def pool(self, pooling: Pooling) -> ModelRunnerOutput:
        pending, self.pending = self.pending, []
        self.recorder.step_done()
        output = pooling.report(pending, self.recorder.worked(self.backend))
        self.backend.graphs.step_done()
        return output

    def execute_dummy_batch(self) -> None:
        """Take part in a step of other ranks without requests of this rank."""
        for planned in self.lockstep.fit([]) if self.lockstep else ():
            self.compute(self.make_batch(planned))
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

    def with_inputs_beside_tokens(self, batch: Batch) -> Batch:
        sources: tuple[Multimodal | PromptEmbeds | Pooling | None, ...]
        sources = (self.multimodal, self.prompt_embeds, self.pooling)
        for source in sources:
            if source is not None:
                batch = source.add_to(batch)
        return batch

    def apply(self, scheduled: SpecSchedulerOutput) -> None:
        self.requests.apply(scheduled)
        self.kv_cache.apply(scheduled)
        if self.multimodal is not None:
            self.multimodal.apply(scheduled, self.requests)
        if self.snapshots is not None:
            self.snapshots.load(scheduled.state_loads)
        if self.target.adapters is not None:
            self.target.adapters.apply(scheduled, self.requests)
        if self.pooling is not None:
            self.pooling.apply(self.requests)
            return
        for request in self.requests.admitted:
            self.sampling.admit(request)
        if self.drafting is not None:
            self.drafting.apply(self.requests)
            self.observe_drafter(self.drafting, scheduled.drafter_status)
        if self.custom is not None:
            self.custom.update(self.requests.freed_rows, self.requests.admitted)

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
        """Copy a planned batch to the device, with what the drafter needs there."""
        if self.drafting is None or planned.shape.phase != DECODE:
            return make_batch(self.requests, planned)
        limits = self.drafting.limit_drafts(planned.requests, max_drafts)
        return make_batch(self.requests, planned, limits, self.drafting.host_drafts(planned.requests))

    def compute(self, batch: Batch) -> None:
        self.recorder.saw(batch.shape)
        shape = batch.shape
        self.rows_alone = self.device_step.forward(
            shape.phase, shape.queries, batch.inputs, batch.multimodal, batch.token_types_T
        )

    def forward(self, batch: Batch) -> None:
        self.compute(batch)
        if self.pooling is not None:
            self.pooling.pool(batch)
            return
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
        if self.custom is not None:
            self.custom.follow(step.requests, output.sampled_token_ids)
        if self.drafting is not None:
            outgrown = self.drafting.outgrown()
            self.drafting.propose_on_host(step, max_drafts)
            if isinstance(output, SpeculativeOutput):
                output.why.update(dict.fromkeys(outgrown, NoDraftReason.LENGTH))
                output.draft_rounds += self.drafting.take_rounds()
        return output

    def release_late_interaction_query_cache(self, query_keys: list[str]) -> None:
        """Called by vLLM's worker class: texts that ended before all others were compared with them."""
        if self.pooling is not None:
            self.pooling.comparisons.release_queries(query_keys)

    def reset_encoder_cache(self) -> None:
        if self.multimodal is not None:
            self.multimodal.reset()

    # --- attributes for functions that users send to workers, by the names of vLLM's runner ---

    @property
    def model(self) -> nn.Module:
        return self.get_model()

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    @property
    def device(self) -> torch.device:
        return self.backend.traits.torch_device

    def get_model(self) -> nn.Module:
        return self.target.model

    def get_draft_model(self) -> nn.Module | None:
        """None where the drafter has no model."""
        return None if self.drafter is None else self.drafter.model

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

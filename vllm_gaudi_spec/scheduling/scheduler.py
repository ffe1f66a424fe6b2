"""vLLM's schedulers, extended with adaptive verification, drafter health checks, audits, and this plugin's metrics.

The platform always sets `scheduler_cls` to one of these classes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec import metrics, upstream
from vllm_gaudi_spec.config import Options, Speculation
from vllm_gaudi_spec.device_table import load_backend
from vllm_gaudi_spec.metrics import StepMetrics
from vllm_gaudi_spec.outputs import AdaptiveStep, CountedOutput, SpecSchedulerOutput, SpeculativeOutput
from vllm_gaudi_spec.records import NoDraftReason
from vllm_gaudi_spec.recurrent.table import num_snapshots
from vllm_gaudi_spec.runner.shapes import Shapes
from vllm_gaudi_spec.scheduling.adaptive import Acceptance, StepTimes
from vllm_gaudi_spec.scheduling.audits import AUDITOR, Audits
from vllm_gaudi_spec.scheduling.counts import DraftCounts
from vllm_gaudi_spec.scheduling.health import DrafterHealth
from vllm_gaudi_spec.scheduling.limits import get_requested_drafts
from vllm_gaudi_spec.scheduling.snapshots import Snapshots
from vllm_gaudi_spec.upstream.block_pool import assign_lowest_blocks_first
from vllm_gaudi_spec.upstream.kv_cache import FullAttentionSpec, UniformTypeKVCacheSpecs
from vllm_gaudi_spec.upstream.scheduler import (
    AsyncScheduler,
    EngineCoreOutputs,
    PauseState,
    RequestSpecDecodeMetrics,
    RequestStatus,
    Scheduler,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

    from vllm_gaudi_spec.records import DraftRound, WorkerCounts
    from vllm_gaudi_spec.upstream.kv_cache import KVCacheConfig, KVCacheSpec
    from vllm_gaudi_spec.upstream.scheduler import (
        KVCacheBlocks,
        Request,
        SchedulerOutput,
        SchedulerStats,
        SpecDecodingStats,
    )


@dataclass
class RequestDrafts(RequestSpecDecodeMetrics):
    """vLLM's per-request metrics, limited to steps in which at least one draft of the request was verified."""

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        # vLLM calls this for every step with draft placeholders, all of which may be padding.
        if num_draft_tokens:
            super().observe(num_draft_tokens, num_accepted, detailed)


class _Speculating(Scheduler):
    """Mixin that must precede one of vLLM's schedulers in the list of base classes."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        caches_prefixes = vllm_config.cache_config.enable_prefix_caching
        # In a model without KV, only snapshots identify cached prefixes. vLLM's KV cache manager asserts that there is
        # KV to look up, so it is created without prefix caching.
        vllm_config.cache_config.enable_prefix_caching = caches_prefixes and bool(kv_cache_config.kv_cache_groups)
        if vllm_config.kv_transfer_config is not None:
            upstream.recompute_resumed_requests()
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        vllm_config.cache_config.enable_prefix_caching = caches_prefixes
        self.kv_cache_manager.enable_caching = caches_prefixes
        if not caches_prefixes and vllm_config.kv_transfer_config is None:
            assign_lowest_blocks_first(self.kv_cache_manager.block_pool)
        options = Options.from_vllm(self.vllm_config)
        speculation = Speculation.from_vllm(self.vllm_config)
        self.step_metrics = StepMetrics()
        self._health = DrafterHealth()
        self._draft_counts: DraftCounts | None = None
        if speculation is not None:
            self._draft_counts = DraftCounts(speculation, self.max_model_len, self.step_metrics)
        self._acceptance: Acceptance | None = None
        self._step_times: StepTimes | None = None
        if speculation is not None and speculation.is_adaptive:
            shapes = Shapes.from_config(self.vllm_config, options, load_backend(), speculation.widths)
            self._acceptance = Acceptance(self.num_spec_tokens)
            self._step_times = StepTimes(shapes.decode_rows, (0, *speculation.widths))
        self._audits: Audits | None = None
        if options.audit_every and speculation is not None:
            self._audits = Audits(options.audit_every, self.vllm_config, speculation, self.step_metrics)
        self._snapshots: Snapshots | None = None
        self._num_local: dict[str, int] = {}
        """Maps each request that is being scheduled to the number of its tokens found in the prefix cache."""
        self._starts: dict[str, int] = {}
        """Maps each request that is being scheduled to the number of tokens covered by its snapshot."""
        if num_slots := num_snapshots(self.vllm_config, options.state_snapshots):
            self.keep_snapshots(num_slots)
        self._block_sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        self._num_chosen = 0
        """Number of drafts per row chosen in the latest step."""
        self._last: tuple[float, AdaptiveStep | None] = (0.0, None)
        """The time at which the latest step ended, and its `AdaptiveStep`."""

    def keep_snapshots(self, num_slots: int) -> None:
        """Keep up to `num_slots` snapshots of recurrent states for the prefix cache."""
        self._snapshots = Snapshots(
            num_slots,
            block_size=self.block_size,
            hash_size=self.hash_block_size,
            drops_a_block=self.use_eagle_block_drop,
        )
        self.need_mamba_block_aligned_split = True  # makes vLLM call `_mamba_block_aligned_split`

    def add_request(self, request: Request) -> None:
        if self._audits is not None and request.client_index != AUDITOR:
            self._abort_audits(self._audits.interrupt())
            self._audits.on_added(request)
        super().add_request(request)
        if request.spec_decode_metrics is not None:  # --per-request-spec-decode-metrics
            request.spec_decode_metrics = RequestDrafts.new(self.num_spec_tokens)

    # --- scheduling a step ---

    def schedule(self, throttle_prefills: bool = False) -> SpecSchedulerOutput:
        if self._audits is not None and self._is_idle():
            for request in self._audits.start(self.max_num_running_reqs):
                self.add_request(request)
        self._starts.clear()
        self._num_local.clear()
        scheduled = SpecSchedulerOutput(**vars(super().schedule(throttle_prefills)))
        if self.connector is not None:
            scheduled.loaded_blocks = self._list_loaded_blocks(scheduled)
        if not self.use_v2_model_runner:
            # vLLM omits images whose tokens are in the prefix cache. After a preemption, these tokens may no longer be
            # cached, but vLLM does not send the images again.
            for new in scheduled.scheduled_new_reqs:
                new.mm_features = self.requests[new.req_id].mm_features
        if self._snapshots is not None:
            self._copy_states(self._snapshots, scheduled)
        self._apply_health(scheduled)
        # Audits never share a step with client requests.
        scheduled.is_audit = any(
            self.requests[req_id].client_index == AUDITOR for req_id in scheduled.num_scheduled_tokens
        )
        if scheduled.is_audit:
            self._limit_drafts(scheduled, 0, NoDraftReason.REQUEST)
        if self._step_times is not None and self._acceptance is not None:
            self._choose_num_drafts(scheduled, self._step_times, self._acceptance)
        return scheduled

    def _try_schedule_encoder_inputs(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, *args: Any, **named: Any
    ) -> tuple[list[int], int, int, list[int], list[int]]:
        # Even with --disable-chunked-mm-input, vLLM splits an image if a chunk begins with that image.
        if self.vllm_config.model_config.is_mm_prefix_lm:
            num_new_tokens = limit_to_whole_images(request.mm_features, num_computed_tokens, num_new_tokens)
        return super()._try_schedule_encoder_inputs(request, num_computed_tokens, num_new_tokens, *args, **named)

    def _get_local_prefix_cache_hit(self, request: Request, *limit: int | None) -> tuple[KVCacheBlocks, int, int, bool]:
        """Return vLLM's prefix cache hit, shortened to the longest prefix with a snapshot of its recurrent states."""
        blocks, num_found, boundary, diverged = super()._get_local_prefix_cache_hit(request, *limit)
        self._num_local[request.request_id] = num_found
        if self._snapshots is None or not self.kv_cache_manager.prefix_cache_lookup_enabled(request):
            return blocks, num_found, boundary, diverged
        groups = self.kv_cache_config.kv_cache_groups
        num_cut = self._snapshots.longest(request, num_found if groups else request.num_tokens - 1)
        if groups and num_cut < num_found:
            # With a sliding window, blocks before an earlier boundary may have been freed.
            if not all(_keeps_all_tokens(group.kv_cache_spec) for group in groups):
                num_cut = 0
            blocks, boundary = self.kv_cache_manager.truncate_computed_blocks(blocks, num_cut), num_found
        self._starts[request.request_id] = num_cut
        return blocks, num_cut, boundary, diverged

    def _list_loaded_blocks(self, scheduled: SpecSchedulerOutput) -> list[int]:
        """Return the blocks whose tokens the connector loads because they are not in the prefix cache."""
        found: list[int] = []
        for req_id, num_local in self._num_local.items():
            end = self.requests[req_id].num_computed_tokens - scheduled.num_scheduled_tokens.get(req_id, 0)
            if end > num_local:
                groups = zip(self.kv_cache_manager.get_block_ids(req_id), self._block_sizes, strict=True)
                found += chain.from_iterable(ids[num_local // size : -(-end // size)] for ids, size in groups)
        return found

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Return the number of tokens to compute in this step so that the prompt chunk ends where a snapshot is useful.

        vLLM's own implementation is for states stored in KV blocks.
        """
        assert self._snapshots is not None
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        return self._snapshots.cut(request, start, num_new_tokens)

    def _copy_states(self, snapshots: Snapshots, scheduled: SpecSchedulerOutput) -> None:
        """Tell workers which snapshots to load before the step and which to save after it."""
        for req_id in scheduled.num_scheduled_tokens:
            if num_tokens := self._starts.get(req_id):
                request = self.requests[req_id]
                start = request.num_computed_tokens - scheduled.num_scheduled_tokens[req_id]
                assert start == num_tokens, f"{req_id} starts at token {start}, but its snapshot covers {num_tokens}"
                scheduled.state_loads[req_id] = snapshots.use(request, num_tokens)
        for req_id, num_tokens in scheduled.num_scheduled_tokens.items():
            request = self.requests[req_id]
            if request.client_index == AUDITOR:
                continue
            end = request.num_computed_tokens  # already includes the tokens of this step
            if (slot := snapshots.keep(request, end - num_tokens, end)) is not None:
                scheduled.state_saves[req_id] = slot

    def _apply_health(self, scheduled: SpecSchedulerOutput) -> None:
        if self._health.is_off:
            self._limit_drafts(scheduled, 0, NoDraftReason.OFF)
        scheduled.drafter_status = self._health.take_status()
        if scheduled.drafter_status is not None and self._draft_counts is not None:
            self._draft_counts.exclude(scheduled.drafter_status.excluded)

    def _choose_num_drafts(self, scheduled: SpecSchedulerOutput, step_times: StepTimes, acceptance: Acceptance) -> None:
        """Choose the number of tokens to draft per row after the step."""
        acceptance.forget(scheduled.finished_req_ids)
        before, self._num_chosen = self._num_chosen, 0
        sampling = self._sampling_requests(scheduled)
        if not (sampling and scheduled.num_spec_tokens_to_schedule):
            return
        max_drafts = {req_id: self._count_useful_drafts(self.requests[req_id]) for req_id in sampling}
        num_tokens = acceptance.expect_tokens(max_drafts)
        self._num_chosen = step_times.choose(len(sampling), num_tokens, limit=scheduled.num_spec_tokens_to_schedule)
        self._limit_drafts(scheduled, self._num_chosen, NoDraftReason.GOODPUT)
        if not self._num_chosen:
            self.step_metrics.count(metrics.SKIPPED_STEPS)
        scheduled.adaptive_step = AdaptiveStep(
            step_times.fit(len(sampling)), before, self._num_chosen, _has_only_decodes(scheduled)
        )

    def _sampling_requests(self, scheduled: SchedulerOutput) -> list[str]:
        """Return the requests that sample in this step, which are the only ones that can use drafts."""
        return [req_id for req_id in scheduled.num_scheduled_tokens if not self.requests[req_id].is_prefill_chunk]

    def _count_useful_drafts(self, request: Request) -> int:
        """Return the maximum number of drafts after this step that the request asks for and its length allows.

        Two tokens are subtracted: the one sampled in this step, and the one that the next step samples in addition to
        accepted drafts. This limit ignores the tokens of a step that is still in flight.
        """
        requested = get_requested_drafts(request.sampling_params, self.num_spec_tokens)
        return max(0, min(requested, request.max_tokens - request.num_output_tokens - 2))

    def _limit_drafts(self, scheduled: SpecSchedulerOutput, max_drafts: int, reason: str) -> None:
        """Limit the number of drafts per row after the step. `reason` explains a limit of 0."""
        scheduled.num_spec_tokens_to_schedule, scheduled.skip_reason = max_drafts, reason
        for req_id in self._sampling_requests(scheduled):
            # With async scheduling, a request already has placeholders for its next drafts, in a list shared between
            # requests.
            request = self.requests[req_id]
            request.spec_token_ids = request.spec_token_ids[:max_drafts]

    # --- processing a step's output ---

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        assert isinstance(scheduler_output, SpecSchedulerOutput)
        steady = self._step_times is not None and self._measure(self._step_times, scheduler_output.adaptive_step)
        if self._draft_counts is not None:
            self._draft_counts.forget(scheduler_output.finished_req_ids)
        if isinstance(model_runner_output, CountedOutput) and model_runner_output.worked is not None:
            self._count_worker(model_runner_output.worked)
        if isinstance(model_runner_output, SpeculativeOutput):
            if self._acceptance is not None and scheduler_output.adaptive_step is not None:
                self._observe_acceptance(
                    self._acceptance, scheduler_output.adaptive_step.num_verified, model_runner_output, steady=steady
                )
            self._observe(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if isinstance(model_runner_output, SpeculativeOutput) and model_runner_output.draft_token_ids is not None:
            self.update_draft_token_ids(model_runner_output.draft_token_ids)
        if self._audits is not None and (ours := outputs.pop(AUDITOR, None)) is not None:
            self._take_audits(self._audits, ours, outputs)
        return outputs

    def _observe(self, scheduled: SpecSchedulerOutput, output: SpeculativeOutput) -> None:
        if self._draft_counts is not None and not scheduled.is_audit:
            self._draft_counts.observe(self.requests, scheduled, output)
        self._observe_rounds(output.draft_rounds)
        # vLLM counts scheduled drafts. If the drafter proposed fewer, the rest are padding, and with async scheduling,
        # all are placeholders. These numbers only correct vLLM's statistics: rejected positions are still freed.
        scheduled.num_invalid_spec_tokens = {
            req_id: len(tokens) - output.num_real_drafts.get(req_id, 0)
            for req_id, tokens in scheduled.scheduled_spec_decode_tokens.items()
        }

    def _observe_rounds(self, rounds: Iterable[DraftRound]) -> None:
        was_off = self._health.is_off
        if num_faults := self._health.observe(rounds):
            self.step_metrics.count(metrics.DRAFTER_FAULTS, num_faults)
        if self._health.is_off and not was_off:
            self.step_metrics.count(metrics.DRAFTER_SWITCHED_OFF)

    def _count_worker(self, worked: WorkerCounts) -> None:
        self.step_metrics.count_total(metrics.STEPS, worked.steps)
        self.step_metrics.count_total(metrics.HOST_SYNCS, worked.num_host_syncs)
        self.step_metrics.count_total(metrics.PREFILL_TOKENS, worked.num_prefill_tokens, metrics.REAL)
        self.step_metrics.count_total(metrics.PREFILL_TOKENS, worked.num_prefill_padding, metrics.PADDING)
        self.step_metrics.count_total(metrics.COMPILED, worked.compiled)
        if self._step_times is not None:
            self._step_times.start_from(worked.step_times)
        for vocabulary, share in worked.coverage.items():
            self.step_metrics.set(metrics.COVERAGE, share, vocabulary)

    def _measure(self, step_times: StepTimes, done: AdaptiveStep | None) -> bool:
        """Measure the time since the previous step. Returns whether both steps had the same shape."""
        now = time.perf_counter()
        (before, last), self._last = self._last, (now, done)
        if done is None or last is None or not done.only_decodes or done.num_verified != done.num_drafts:
            return False
        # The previous step may have included prompts, because with short requests, one decode rarely follows another.
        # In that case, the measured time may include the time in which the drafter reads prompts, which is also a cost
        # of drafting.
        if done == last._replace(only_decodes=True):
            step_times.observe(done.batch_size, done.num_verified, now - before)
        return done == last

    def _observe_acceptance(
        self, acceptance: Acceptance, num_chosen: int, output: SpeculativeOutput, *, steady: bool
    ) -> None:
        """Record which drafts were accepted. `num_chosen` is the number of drafts per row that was chosen for
        verification in the step."""
        if not num_chosen:
            acceptance.observe_idle(output.num_real_drafts)
        for req_id, num_drafts in output.num_real_drafts.items():
            tokens = output.sampled_token_ids[output.req_id_to_index[req_id]]
            # A request may have finished while this step was in flight.
            if req_id not in self.requests or req_id in output.started or not tokens:
                continue
            if num_drafts or (num_chosen and steady):
                # After a pause, a drafter may need a few steps before it proposes drafts again. Later, a step without
                # proposed drafts counts like a rejected draft.
                acceptance.observe(req_id, num_drafts, len(tokens) - 1)

    # --- idle steps ---

    def _is_idle(self) -> bool:
        """Whether there are no requests from clients."""
        return self._pause_state == PauseState.UNPAUSED and self.get_request_counts() == (0, 0)

    def shut_down(self) -> None:
        """Drop audits, because an engine that is shutting down should wait only for client requests."""
        self._drop_audits()

    def _take_audits(self, audits: Audits, ours: EngineCoreOutputs, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Process the outputs of audits, which are not sent to front ends. Their statistics are reported with the
        outputs for client 0."""
        for output in ours.outputs:
            audits.observe(output)
        if ours.scheduler_stats is not None:
            outputs.setdefault(0, EngineCoreOutputs()).scheduler_stats = ours.scheduler_stats

    def _abort_audits(self, req_ids: list[str]) -> None:
        if req_ids:
            super().finish_requests(req_ids, RequestStatus.FINISHED_ABORTED)

    def _drop_audits(self) -> None:
        if self._audits is not None:
            self._abort_audits(self._audits.drop())

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        if self._audits is not None:
            self._audits.on_ended(request)
        return super()._free_request(request, delay_free_blocks)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        if request_ids is None:  # the caller ends all requests and informs their clients
            self._drop_audits()
        return super().finish_requests(request_ids, finished_status)

    def set_pause_state(self, pause_state: PauseState) -> None:
        if pause_state != PauseState.UNPAUSED:
            self._drop_audits()
        super().set_pause_state(pause_state)

    def reset_prefix_cache(self, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        """Reset the prefix cache and drop audits, whose blocks would prevent a reset."""
        self._drop_audits()
        stays = bool(self.running) and not reset_running_requests
        if self._snapshots is not None and not self.kv_cache_config.kv_cache_groups and stays:
            return False  # vLLM checks whether blocks are in use, but models without KV have no blocks
        is_reset = super().reset_prefix_cache(reset_running_requests, *args, **kwargs)
        if is_reset and self._snapshots is not None:
            self._snapshots.clear()
        return is_reset

    def get_request_counts(self) -> tuple[int, int]:
        """Return the numbers of client requests, which are 0 while only an audit runs."""
        if self._audits is not None and self._audits.is_running:
            return 0, 0
        return super().get_request_counts()

    def has_requests(self) -> bool:
        if super().has_requests():
            return True
        if self._audits is None:
            return False
        return self._audits.is_running or (self._audits.is_waiting and self._is_idle())

    # --- reporting to the front end ---

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats, news = super().make_stats(*args, **kwargs), self.step_metrics.take()
        if stats is None:  # with --disable-log-stats
            return None
        ours: dict[str, Any] = {metrics.STATS_FIELD: news}
        return replace(stats, **ours)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        # Steps in which no draft of a request was verified would lower the mean acceptance length.
        if num_draft_tokens == (num_invalid_spec_tokens or {}).get(request_id, 0):
            return spec_decoding_stats
        return super().make_spec_decoding_stats(
            spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
        )


class SpecScheduler(_Speculating):
    """Scheduler without async scheduling."""

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take drafts, except for requests that were preempted, and possibly resumed, while their step was in flight.

        With pipeline parallelism, several steps are in flight.
        """
        super().update_draft_token_ids(draft_token_ids)
        for request in filter(None, map(self.requests.get, draft_token_ids.req_ids)):
            if request.status == RequestStatus.PREEMPTED or request.num_in_flight_tokens:
                request.spec_token_ids = []


class SpecAsyncScheduler(_Speculating, AsyncScheduler):
    """Scheduler with async scheduling."""


def limit_to_whole_images(features: list[MultiModalFeatureSpec], num_computed: int, num_new: int) -> int:
    """Return how many of a request's `num_new` tokens can be computed without splitting an image.

    The result is 0 if the chunk would begin with an image that does not fit. The request then waits for a later step.
    """
    end = num_computed + num_new
    for feature in features:
        for first, last in feature.mm_position.extract_embeds_range():
            if num_computed <= last and first < end <= last:
                return max(0, first - num_computed)
    return num_new


def _keeps_all_tokens(spec: KVCacheSpec) -> bool:
    """Whether these layers keep the KV of all tokens of a request."""
    specs = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)
    return all(isinstance(one, FullAttentionSpec) for one in specs)


def _has_only_decodes(scheduled: SchedulerOutput) -> bool:
    cached, drafts = scheduled.scheduled_cached_reqs, scheduled.scheduled_spec_decode_tokens
    if scheduled.scheduled_new_reqs or cached.resumed_req_ids:
        return False
    return all(count == 1 + len(drafts.get(req_id, ())) for req_id, count in scheduled.num_scheduled_tokens.items())

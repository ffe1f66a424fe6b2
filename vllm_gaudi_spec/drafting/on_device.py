"""Drafting on the device, between verification and the step's report. Device drafters support async scheduling."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds

from vllm_gaudi_spec.attention.metadata import Blocks
from vllm_gaudi_spec.device_rows import DeviceRows
from vllm_gaudi_spec.drafting.base import Drafting
from vllm_gaudi_spec.drafting.choice import DraftChoice, DraftProbs
from vllm_gaudi_spec.graphs import DRAFTS, Job
from vllm_gaudi_spec.records import DraftBatch, SampledRows
from vllm_gaudi_spec.sampling.branches import Branch
from vllm_gaudi_spec.scheduling.limits import RowLimits, apply_limits

if TYPE_CHECKING:
    from vllm_gaudi_spec.config import Speculation
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.drafting.base import DeviceProposer, DrafterKVSync, DraftingContext
    from vllm_gaudi_spec.drafting.guard import Guard
    from vllm_gaudi_spec.records import Batch, DraftRound, Request, Shape, StepResult
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.step_inputs import StepInputs


class DeviceRowLimits(RowLimits):
    """Row limits that are also stored on the device, for use with lengths that only the device knows."""

    def __init__(self, backend: DeviceBackend, max_rows: int, speculation: Speculation, max_model_len: int) -> None:
        super().__init__(max_rows, speculation, max_model_len)
        self.table = DeviceRows(backend, max_rows, np.zeros(2, dtype=np.int32))

    def _set(self, row: int, reach: int, max_drafts: int) -> None:
        super()._set(row, reach, max_drafts)
        self.table.set(row, self._limits_np[row].copy())

    def compute_max_drafts_on_device(
        self, rows_B: torch.Tensor, lengths_B: torch.Tensor, limits_B: torch.Tensor
    ) -> torch.Tensor:
        """Return the number of drafts that each row can use, at most `limits_B`, int32 [B]. Runs inside a graph."""
        return torch.minimum(apply_limits(self.table.table_RX.index_select(0, rows_B), lengths_B), limits_B)


class DeviceDrafting(Drafting):
    verifies_drafts = True

    def __init__(
        self,
        context: DraftingContext,
        *,
        proposer: DeviceProposer,
        row_limits: DeviceRowLimits,
        guard: Guard,
        kv_sync: DrafterKVSync,
    ) -> None:
        self._guard = guard
        self._disabled = False
        self._proposer = proposer
        self._row_limits = row_limits
        speculation, requests = context.speculation, context.requests
        self._requests = requests
        self._recorder = context.recorder
        self._shapes = context.shapes
        self._num_drafts = speculation.num_drafts
        self._widths = speculation.widths if proposer.drafts_one_by_one else (speculation.num_drafts,)
        """Numbers of drafts for which graphs exist."""
        self._mode = speculation.drafting
        self._choice = DraftChoice(speculation, requests, context.sampling)
        self.lookahead = 1 + self._num_drafts if kv_sync.has_kv else 0
        self._draft_probs = DraftProbs(speculation, context.max_rows, context.vocab_size, context.device)
        self._kv_sync = kv_sync
        self.reports_drafts = kv_sync.has_kv
        if not kv_sync.has_kv:
            # Drafting a fixed k without a model takes less time than extra graphs for sampling passes without drafts.
            always = context.drafter is None and len(speculation.widths) == 1
            self.pass_drafts = (self._num_drafts,) if always else (0, self._num_drafts)
        self._draft_rows = requests.backend.graphs.graph(self._draft_on_device)

    def apply(self, requests: Requests) -> None:
        for request in requests.admitted:
            self._row_limits.admit(request.row, request.params, request.num_prompt)
        self._kv_sync.on_admitted()
        if requests.admitted:
            self._row_limits.table.flush()

    def update_drafter_state(self, restarted: list[Request], excluded: list[Request], *, disabled: bool) -> None:
        self._disabled = disabled
        if restarted:
            self._kv_sync.on_faulty(restarted)
        if excluded:
            self._kv_sync.invalidate(excluded)  # the blocks may have caused the fault, and requests could share them
        for request in excluded:
            self._row_limits.exclude(request.row)
        self._row_limits.table.flush()

    def take_rounds(self) -> list[DraftRound]:
        return self._guard.take_rounds()

    def cap_scheduled_drafts(self, requests: list[Request], num_scheduled: list[int]) -> np.ndarray:
        if self._disabled:
            return np.zeros(len(requests), dtype=np.int32)
        return self._cap_drafts(requests, np.array(num_scheduled, dtype=np.int32))

    def _cap_drafts(self, requests: list[Request], limit: int | np.ndarray) -> np.ndarray:
        """Return the maximum number of drafts for each request, regardless of tokens in flight, as int32."""
        # With async scheduling, `num_computed` includes the drafts of the step in flight as if they were accepted.
        shortest_np = np.array([request.num_computed for request in requests], dtype=np.int32) + 1 - self._num_drafts
        return self._row_limits.compute_max_drafts(_get_rows(requests), shortest_np, limit)

    def follow(self, batch: Batch) -> None:
        if self._disabled:
            return
        try:
            self._kv_sync.on_forward(batch)
        except Exception as error:
            requests = list(dict.fromkeys(batch.requests))
            self._guard.handle_error(error, requests)
            self._kv_sync.invalidate(requests)

    def gather_probs(self, rows_B: torch.Tensor, num_drafts: int) -> torch.Tensor | None:
        return self._draft_probs.gather(rows_B, num_drafts)

    def on_verified(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> None:
        self._kv_sync.on_verified(rows_B, lengths_B)

    def choose_pass_drafts(self, max_drafts: int) -> tuple[int, int]:
        limit = 0 if self._disabled else max_drafts
        return self.pass_drafts[-1 if limit else 0], limit

    def propose(self, sampled: SampledRows, branch: Branch, max_drafts: int) -> bool:
        if self.pass_error is not None:
            error, self.pass_error = self.pass_error, None
            if not self._disabled:
                self._guard.handle_error(error, sampled.requests)
        if self._disabled or not self._kv_sync.has_kv:
            return False
        requests = sampled.requests
        max_drafts_np = self._cap_drafts(requests, max_drafts)
        drafts_follow = max_drafts > 0 and max_drafts_np.any()
        batch = None
        if drafts_follow or self._kv_sync.reads_every_step:
            batch = self._make_round_batch(sampled, max_drafts)
        try:
            self._kv_sync.before_round(sampled, max_drafts_np, batch)
        except Exception as error:
            self._guard.handle_error(error, requests)
            self._kv_sync.invalidate(requests)
            return False
        if batch is None or not drafts_follow:
            return False
        try:
            self._draft(batch, branch.select_drafting(self._mode), self._fit_width(max_drafts))
        except Exception as error:
            self._guard.handle_error(error, requests)
            self._kv_sync.on_faulty(requests)
            return False
        self._kv_sync.on_drafted(requests, max_drafts_np)
        return True

    def _make_round_batch(self, sampled: SampledRows, max_drafts: int) -> DraftBatch:
        """Return the rows to draft for. They come from the step's decode if possible."""
        if sampled.decode is not None:
            return DraftBatch(sampled.decode.inputs, sampled.decode.shape._replace(queries=1))
        ends = [end + self.lookahead for end in sampled.ends]
        shape = self._shapes.decode(1, ends, last_block=self._requests.find_last_block(sampled.requests))
        return self._requests.make_draft_batch(sampled.requests, ends, shape, max_drafts)

    def _fit_width(self, num_drafts: int) -> int:
        return min(width for width in self._widths if width >= num_drafts)

    def _draft(self, batch: DraftBatch, branch: Branch, num_drafts: int) -> None:
        self._recorder.saw(self._signature(batch.shape, branch, num_drafts))
        self._draft_rows(batch.inputs, branch, num_drafts)

    # --- device ---

    def _draft_on_device(self, step: StepInputs, branch: Branch, num_drafts: int) -> None:
        rows = step.split()
        self._run_round(rows.rows_B, rows.max_drafts_B, rows.blocks, branch, num_drafts)

    def draft_in_pass(self, rows_B: torch.Tensor, max_drafts_B: torch.Tensor, branch: Branch, num_drafts: int) -> None:
        try:
            self._run_round(rows_B, max_drafts_B, Blocks((), ()), branch.select_drafting(self._mode), num_drafts)
        except Exception as error:
            self.pass_error = error

    def _run_round(
        self, rows_B: torch.Tensor, limits_B: torch.Tensor, blocks: Blocks, branch: Branch, num_drafts: int
    ) -> None:
        lengths_B = self._requests.lengths(rows_B)
        limits_B = self._row_limits.compute_max_drafts_on_device(rows_B, lengths_B, limits_B)
        max_drafts_B = self._kv_sync.limit_drafts(rows_B, lengths_B, limits_B)
        hidden = self._kv_sync.gather_hidden(rows_B, lengths_B)
        request = self._choice.make_request(rows_B, lengths_B, max_drafts_B, blocks, branch, num_drafts, hidden)
        drafts = self._guard.check_drafts(self._proposer.propose(request), request, self._draft_probs.vocab_size)
        self._draft_probs.put(rows_B, drafts)
        # Store drafts only after everything that may fail, so that rows have no drafts after a failure.
        self._requests.put_drafts(rows_B, lengths_B, drafts)
        self._kv_sync.on_round_written(rows_B, lengths_B, drafts)

    # --- after a step ---

    def get_draft_token_ids(self, step: StepResult) -> DraftTokenIds:
        names = [request.req_id for request in step.requests]
        if step.drafts is None:
            return DraftTokenIds(names, [[] for _ in names])
        tokens, counts = step.drafts.tokens_BK.tolist(), step.drafts.num_drafts_B.tolist()
        return DraftTokenIds(names, [row[:count] for row, count, _ in zip(tokens, counts, names, strict=False)])

    # --- warm-up ---

    def _signature(self, shape: Shape, branch: Branch, num_drafts: int) -> Hashable:
        return ("draft", *shape, branch, num_drafts)

    def jobs(self) -> Iterator[Job]:
        """Yield warm-up runs for the drafter's reads, and for drafting by rows, context, and sampling branch."""
        yield Job("states", self._row_limits.table.warm_up)
        yield from self._kv_sync.jobs()
        branches = sorted(self._choice.list_branches())
        shapes = self._shapes.plain_decodes() if self._kv_sync.has_kv else []
        for shape, branch, num_drafts in product(reversed(shapes), branches, reversed(self._widths)):
            run = partial(self._draft_padding, shape, branch, num_drafts)
            signature = self._signature(shape, branch, num_drafts)
            yield Job(DRAFTS, run, (signature,), shape.rows, branch == Branch())

    def propose_for_padding(self, num_rows: int, num_drafts: int) -> None:
        # Without KV, the sampling pass generates the drafts.
        if not self._kv_sync.has_kv or not (num_drafts or self._kv_sync.reads_every_step):
            return
        batch = self._requests.make_draft_batch([], [], self._shapes.decode(1, [], num_rows))
        if self._kv_sync.reads_every_step:
            sampled = SampledRows(requests=[], ends=[0], num_queries=1 + num_drafts, decode=None)
            self._kv_sync.before_round(sampled, np.zeros(0, dtype=np.int32), batch)
        if num_drafts:
            self._draft(batch, Branch(), self._fit_width(num_drafts))

    def _draft_padding(self, shape: Shape, branch: Branch, num_drafts: int) -> None:
        self._draft(self._requests.make_draft_batch([], [], shape), branch, num_drafts)


def _get_rows(requests: list[Request]) -> np.ndarray:
    return np.array([request.row for request in requests], dtype=np.int64)

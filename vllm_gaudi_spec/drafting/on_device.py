"""Drafters that work on device tensors, between the verification and the report: steps may overlap."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds

from vllm_gaudi_spec.drafting.base import DeviceProposer
from vllm_gaudi_spec.drafting.choice import DraftChoice
from vllm_gaudi_spec.drafting.guard import Guard
from vllm_gaudi_spec.drafting.limits import wanted
from vllm_gaudi_spec.drafting.reading import NOWHERE, Placed, Reading
from vllm_gaudi_spec.records import Drafts
from vllm_gaudi_spec.sampling.params import Branch

if TYPE_CHECKING:
    from vllm_gaudi_spec.attention.inputs import Blocks
    from vllm_gaudi_spec.config import Speculation
    from vllm_gaudi_spec.drafting.choice import DraftLaws
    from vllm_gaudi_spec.drafting.limits import LengthSplit
    from vllm_gaudi_spec.drafting.load import Draft
    from vllm_gaudi_spec.drafting.universal.coverage import Coverage
    from vllm_gaudi_spec.records import Batch, DraftRound, Request, SampleBatch, StepResult
    from vllm_gaudi_spec.runner.graphs import StepRecorder
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.runner.shapes import Shapes
    from vllm_gaudi_spec.sampling.params import Sampling, SamplingInputs


class DeviceDrafting:
    def __init__(
        self,
        proposer: DeviceProposer,
        split: LengthSplit,
        requests: Requests,
        recorder: StepRecorder,
        shapes: Shapes,
        speculation: Speculation,
        laws: DraftLaws,
        guard: Guard,
        reading: Reading | None = None,
        coverage: Coverage | None = None,
    ) -> None:
        self._guard = guard
        self._is_off = False
        self._proposer = proposer
        self._split = split
        self._requests = requests
        self._recorder = recorder
        self._shapes = shapes
        self._num_drafts = speculation.num_drafts
        self._choice = DraftChoice(speculation, requests.backend.rules)
        self._laws = laws
        self._reading = reading or Reading()
        self._coverage = coverage
        self._draft_rows = requests.backend.graph(self._draft_on_device)

    def apply(self, requests: Requests) -> None:
        for request in requests.admitted:
            self._split.admit(request.row, request.params, request.num_prompt)
            if self._coverage is not None:
                self._coverage.saw(request.prompt)
        self._split.pace(requests.paced_rows())
        self._reading.apply()

    def hear(self, again: list[Request], never: list[Request], *, is_off: bool) -> None:
        self._is_off = is_off
        if again:
            self._reading.spoilt(again)
        if never:
            self._reading.missed(never)  # what makes them fail may stand in blocks that others would share
        for request in never:
            self._split.exclude(request.row)

    def take_rounds(self) -> list[DraftRound]:
        return self._guard.take()

    def outgrown(self) -> Collection[str]:
        return ()

    def most(self, requests: list[Request], num_scheduled: list[int]) -> np.ndarray:
        if self._is_off:
            return np.zeros(len(requests), dtype=np.int32)
        return self._possible(requests, np.array(num_scheduled, dtype=np.int32))

    def _possible(self, requests: list[Request], most: int | np.ndarray) -> np.ndarray:
        """int32: the most drafts that the device may have for each request, whatever is in flight."""
        # Asynchronously scheduled, `num_computed` counts the drafts of the step in flight as accepted.
        rows_np = np.array([request.row for request in requests], dtype=np.int64)
        shortest_np = np.array([request.num_computed for request in requests], dtype=np.int32) + 1 - self._num_drafts
        return self._split.wanted_np(rows_np, shortest_np, most)

    def follow(self, batch: Batch) -> None:
        if self._is_off:
            return
        try:
            self._reading.follow(batch)
        except Exception as error:
            self._guard.caught(error, batch.requests)
            self._reading.missed(batch.requests)

    def probs(self, rows_B: torch.Tensor) -> torch.Tensor | None:
        return self._laws.of(rows_B)

    def settle(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> None:
        self._reading.settle(rows_B, lengths_B)

    def propose(self, batch: SampleBatch, lengths_B: torch.Tensor, inputs: SamplingInputs, most: int) -> Drafts | None:
        if not batch.requests or self._is_off:  # without requests it is warm-up, which has rounds of its own
            return None
        most_np = self._split.paced(batch.rows_np, most)
        able_np = self._possible(batch.requests, most_np[: len(batch.requests)])
        drafts_follow = most > 0 and able_np.any()
        placed = NOWHERE
        if self._reading.has_kv and (drafts_follow or self._reading.every_step):
            # One token more than were known, and the drafts.
            ends = [end + 1 + self._num_drafts for end in batch.ends]
            placed = self._place(batch, ends, self._shapes.decode_context(ends))
        try:
            self._reading.before_round(batch, lengths_B, able_np, placed)
        except Exception as error:
            self._guard.caught(error, batch.requests)
            self._reading.missed(batch.requests)
            return None
        if not drafts_follow:
            return None
        try:
            drafts = self._draft(batch, lengths_B, inputs, most_np, placed)
        except Exception as error:
            self._guard.caught(error, batch.requests)
            self._reading.spoilt(batch.requests)
            return None
        self._reading.drafted(batch.requests, able_np)
        return drafts

    def _place(self, batch: SampleBatch, ends: list[int], context: int) -> Placed:
        return Placed(context, self._requests.decode_blocks(batch.rows_np, ends, context))

    def _draft(
        self,
        batch: SampleBatch,
        lengths_B: torch.Tensor,
        inputs: SamplingInputs,
        most: int | np.ndarray,
        placed: Placed,
    ) -> Drafts:
        branch = self._choice.branch(inputs)
        self._recorder.saw(self._signature(len(batch.rows_np), placed.context, branch))
        limits_B2 = self._split.upload(batch.rows_np, most)
        return self._draft_rows(batch.rows_B, lengths_B, limits_B2, placed.blocks, inputs.for_drafting(branch))

    # --- what runs on the device ---

    def _draft_on_device(
        self,
        rows_B: torch.Tensor,
        lengths_B: torch.Tensor,
        limits_B2: torch.Tensor,
        blocks: Blocks,
        inputs: SamplingInputs,
    ) -> Drafts:
        wanted_B = self._reading.able(rows_B, lengths_B, wanted(limits_B2, lengths_B))
        hidden = self._reading.hidden(rows_B, lengths_B)
        request = self._choice.request(self._requests, rows_B, lengths_B, wanted_B, blocks, inputs, hidden)
        drafts = self._guard.usable(self._proposer.propose(request), request, self._laws.vocab_size)
        self._laws.put(rows_B, drafts)
        # Last of what may fail: until then the rows have no drafts.
        self._requests.put_drafts(rows_B, lengths_B, drafts)
        self._reading.wrote(rows_B, lengths_B, drafts)
        return drafts.known

    # --- behind a step ---

    def propose_behind(self, step: StepResult, most: int) -> None:
        """It is done."""

    def drafts_of(self, step: StepResult) -> DraftTokenIds:
        names = [request.req_id for request in step.requests]
        if step.drafts is None:
            return DraftTokenIds(names, [[] for _ in names])
        tokens, counts = step.drafts.tokens_BK.tolist(), step.drafts.num_drafts_B.tolist()
        return DraftTokenIds(names, [row[:count] for row, count, _ in zip(tokens, counts, names, strict=False)])

    def in_use(self) -> dict[str, int]:
        """All of it stands in tensors, by row."""
        return {}

    def _signature(self, num_rows: int, context: int, branch: Branch) -> Hashable:
        return ("draft", num_rows, context, branch)

    def _sizes(self) -> list[tuple[int, int]]:
        """Rows and contexts of rounds of drafts."""
        return self._shapes.decode_sizes() if self._reading.has_kv else [(rows, 0) for rows in self._shapes.decode_rows]

    def signatures(self, sampling: Sampling) -> Iterator[Hashable]:
        """Rounds of drafts by rows, context and filters; and what a drafter reads besides."""
        branches = self._choice.branches(sampling)
        for (num_rows, context), branch in product(self._sizes(), branches):
            yield self._signature(num_rows, context, branch)
        yield from self._reading.signatures()

    def rounds(self, sampling: Sampling) -> Iterator[tuple[int, Branch, Draft]]:
        for num_rows, num_queries, context in self._reading.read_padding():
            yield num_rows, Branch(), partial(self._read_padding, num_queries=num_queries, context=context)
        branches = sorted(self._choice.branches(sampling))
        for (num_rows, context), branch in product(reversed(self._sizes()), branches):
            yield num_rows, branch, partial(self._draft_padding, context=context)

    def _read_padding(
        self, batch: SampleBatch, lengths_B: torch.Tensor, inputs: SamplingInputs, num_queries: int, context: int
    ) -> None:
        none_np, batch = np.zeros(0, dtype=np.int32), replace(batch, num_queries=num_queries)
        self._reading.before_round(batch, lengths_B, none_np, self._place(batch, [], context))

    def _draft_padding(self, batch: SampleBatch, lengths_B: torch.Tensor, inputs: SamplingInputs, context: int) -> None:
        placed = self._place(batch, [], context) if self._reading.has_kv else NOWHERE
        self._draft(batch, lengths_B, inputs, self._num_drafts, placed)

    def no_drafts(self, num_rows: int) -> Drafts | None:
        upload = self._requests.backend.upload
        tokens_BK = upload(torch.zeros(num_rows, self._num_drafts, dtype=torch.int32))
        return Drafts(tokens_BK, upload(torch.zeros(num_rows, dtype=torch.int32)))

    def warm_up(self) -> None:
        self._reading.warm_up()

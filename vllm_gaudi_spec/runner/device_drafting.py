"""Drafters that work on device tensors, between the verdict and the report: steps may overlap."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds

from vllm_gaudi_spec.attention.inputs import Blocks
from vllm_gaudi_spec.proposers.base import DeviceProposer, Drafts
from vllm_gaudi_spec.proposers.length_split import wanted
from vllm_gaudi_spec.runner.draft_choice import DraftChoice

if TYPE_CHECKING:
    from vllm_gaudi_spec.config import Speculation
    from vllm_gaudi_spec.proposers.length_split import LengthSplit
    from vllm_gaudi_spec.proposers.universal.coverage import Coverage
    from vllm_gaudi_spec.runner.batch import Batch, SampleBatch
    from vllm_gaudi_spec.runner.draft_choice import DraftLaws
    from vllm_gaudi_spec.runner.drafter_state import DrafterState, Read
    from vllm_gaudi_spec.runner.drafting import Draft
    from vllm_gaudi_spec.runner.recorder import StepRecorder
    from vllm_gaudi_spec.runner.report import Step
    from vllm_gaudi_spec.runner.requests import Request, Requests
    from vllm_gaudi_spec.runner.sampling import Branch, Sampling, SamplingInputs
    from vllm_gaudi_spec.runner.shapes import Shapes


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
        state: DrafterState | None = None,
        coverage: Coverage | None = None,
    ) -> None:
        self._proposer = proposer
        self._split = split
        self._requests = requests
        self._recorder = recorder
        self._shapes = shapes
        self._num_drafts = speculation.num_drafts
        self._choice = DraftChoice(speculation)
        self._laws = laws
        self._state = state
        self._coverage = coverage
        self._draft_rows = requests.backend.graph(self._draft_on_device)
        self._read = requests.backend.graph(self._read_rows)

    def apply(self, requests: Requests) -> None:
        for request in requests.admitted:
            self._split.admit(request.row, request.params, request.num_prompt)
            if self._coverage is not None:
                self._coverage.saw(request.prompt)
        if self._state is not None:
            self._state.apply()

    def most(self, requests: list[Request], num_scheduled: list[int]) -> np.ndarray:
        return self._possible(requests, np.array(num_scheduled, dtype=np.int32))

    def _possible(self, requests: list[Request], most: int | np.ndarray) -> np.ndarray:
        """int32: the most drafts that the device may have for each request, whatever is in flight."""
        # Asynchronously scheduled, `num_computed` counts the drafts of the step in flight as accepted.
        rows_np = np.array([request.row for request in requests], dtype=np.int64)
        shortest_np = np.array([request.num_computed for request in requests], dtype=np.int32) + 1 - self._num_drafts
        return self._split.wanted_np(rows_np, shortest_np, most)

    def follow(self, batch: Batch) -> None:
        if self._state is not None and (read := self._state.chunk(batch)) is not None:
            self._read_chunk(read)

    def probs(self, rows_B: torch.Tensor) -> torch.Tensor | None:
        return self._laws.of(rows_B)

    def settle(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> None:
        if self._state is not None:
            self._state.settle(rows_B, lengths_B)

    def propose(self, batch: SampleBatch, lengths_B: torch.Tensor, inputs: SamplingInputs, most: int) -> Drafts | None:
        able_np = self._possible(batch.requests, most)
        if self._state is not None:
            for read in self._state.catch_up(batch, able_np):
                self._read_chunk(read)
        if not most or not able_np.any():
            return None
        # One token more than were known, and the drafts.
        ends = [end + 1 + self._num_drafts for end in batch.ends]
        context = 0 if self._state is None else self._shapes.decode_context(ends)
        drafts = self._draft(batch, lengths_B, inputs, most, ends, context)
        if self._state is not None:
            self._state.drafted(batch.requests, able_np)
        return drafts

    def _draft(
        self,
        batch: SampleBatch,
        lengths_B: torch.Tensor,
        inputs: SamplingInputs,
        most: int,
        ends: list[int],
        context: int,
    ) -> Drafts:
        branch = self._choice.branch(inputs)
        self._recorder.saw(self._signature(len(batch.rows_np), context, branch))
        return self._draft_rows(
            batch.rows_B,
            lengths_B,
            self._split.upload(batch.rows_np, most),
            # Without KV of its own a drafter has no use for blocks, and is one program for every context.
            Blocks((), ()) if self._state is None else self._requests.decode_blocks(batch.rows_np, ends, context),
            inputs.for_drafting(branch),
        )

    # --- what runs on the device ---

    def _read_chunk(self, read: Read) -> None:
        self._recorder.saw(("draft", *read.shape))
        self._read(read.rows_P, read.host_2P, read.blocks, read.shape.queries, read.single_row_real)

    def _read_rows(
        self, rows_P: torch.Tensor, host_2P: torch.Tensor, blocks: Blocks, queries: int, single_row_real: int | None
    ) -> None:
        assert self._state is not None
        self._proposer.follow(self._state.read(rows_P, host_2P, blocks, queries, single_row_real))

    def _draft_on_device(
        self,
        rows_B: torch.Tensor,
        lengths_B: torch.Tensor,
        limits_B2: torch.Tensor,
        blocks: Blocks,
        inputs: SamplingInputs,
    ) -> Drafts:
        wanted_B = wanted(limits_B2, lengths_B)
        if self._state is not None:
            wanted_B = torch.where(self._state.reads_all(rows_B, lengths_B), wanted_B, 0)
        drafts = self._proposer.propose(
            self._choice.request(self._requests, rows_B, lengths_B, wanted_B, blocks, inputs)
        )
        self._requests.put_drafts(rows_B, lengths_B, drafts)
        self._laws.put(rows_B, drafts)
        if self._state is not None:
            self._state.wrote(rows_B, lengths_B, drafts)
        return drafts

    # --- behind a step ---

    def propose_behind(self, step: Step, most: int) -> None:
        """It is done."""

    def drafts_of(self, step: Step) -> DraftTokenIds:
        names = [request.req_id for request in step.requests]
        if step.drafts is None:
            return DraftTokenIds(names, [[] for _ in names])
        tokens, counts = step.drafts.tokens_BK.tolist(), step.drafts.num_drafts_B.tolist()
        return DraftTokenIds(names, [row[:count] for row, count, _ in zip(tokens, counts, names, strict=False)])

    def _signature(self, num_rows: int, context: int, branch: Branch) -> Hashable:
        return ("draft", num_rows, context, branch)

    def _sizes(self) -> list[tuple[int, int]]:
        """Rows and contexts of rounds of drafts."""
        return [(rows, 0) for rows in self._shapes.decode_rows] if self._state is None else self._shapes.decode_sizes()

    def signatures(self, sampling: Sampling) -> Iterator[Hashable]:
        """Rounds of drafts by rows, context and filters; and the prompt chunks that a drafter reads."""
        branches = self._choice.branches(sampling)
        for (num_rows, context), branch in product(self._sizes(), branches):
            yield self._signature(num_rows, context, branch)
        if self._state is not None:
            for shape in self._shapes.prefills():
                yield ("draft", *shape)

    def rounds(self, sampling: Sampling) -> Iterator[tuple[int, Branch, Draft]]:
        branches = sorted(self._choice.branches(sampling))
        for (num_rows, context), branch in product(reversed(self._sizes()), branches):
            yield num_rows, branch, partial(self._draft, most=self._num_drafts, ends=[], context=context)

    def no_drafts(self, num_rows: int) -> Drafts | None:
        upload = self._requests.backend.upload
        tokens_BK = upload(torch.zeros(num_rows, self._num_drafts, dtype=torch.int32))
        return Drafts(tokens_BK, upload(torch.zeros(num_rows, dtype=torch.int32)))

    def warm_up(self) -> None:
        if self._state is not None:
            self._state.warm_up()

"""Drafters that work on device tensors, between the verdict and the report: steps may overlap."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds

from vllm_gaudi_spec.proposers.base import DeviceProposer, DraftRequest, Drafts
from vllm_gaudi_spec.runner.draft_choice import DraftChoice

if TYPE_CHECKING:
    from vllm_gaudi_spec.config import Speculation
    from vllm_gaudi_spec.proposers.length_split import LengthSplit
    from vllm_gaudi_spec.proposers.universal.coverage import Coverage
    from vllm_gaudi_spec.runner.batch import Batch, SampleBatch
    from vllm_gaudi_spec.runner.draft_choice import DraftLaws
    from vllm_gaudi_spec.runner.drafter_state import DrafterState
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
        if self._state is not None and (chunk := self._state.chunk(batch)) is not None:
            self._recorder.saw(("draft", *batch.shape))
            self._proposer.follow(chunk)

    def probs(self, rows_B: torch.Tensor) -> torch.Tensor | None:
        return self._laws.of(rows_B)

    def propose(self, batch: SampleBatch, lengths_B: torch.Tensor, inputs: SamplingInputs, most: int) -> Drafts | None:
        wanted_B = self._split.wanted(batch.rows_np, lengths_B, most)
        able_np = self._possible(batch.requests, most)
        if self._state is not None:
            self._state.settle(batch.rows_B, lengths_B)
            for shape, chunk in self._state.catch_up(batch, lengths_B, able_np):
                self._recorder.saw(("draft", *shape))
                self._proposer.follow(chunk)
            wanted_B = torch.where(self._state.reads_all(batch.rows_B, lengths_B), wanted_B, 0)
        if not most or (batch.requests and not able_np.any()):
            return None
        # One token more than were known, and the drafts.
        context = self._shapes.fit_context(min(batch.longest + 1 + self._num_drafts, self._shapes.max_context))
        self._recorder.saw(self._signature(len(batch.rows_np), context, self._choice.branch(inputs)))
        drafts = self._proposer.propose(
            DraftRequest(
                rows_B=batch.rows_B,
                history_RM=self._requests.history_RM,
                lengths_B=lengths_B,
                num_wanted_B=wanted_B,
                num_drafts=self._num_drafts,
                blocks=self._requests.blocks(batch.rows_np, context),
                choose=self._choice.behind(lengths_B, inputs),
            )
        )
        self._requests.put_drafts(batch.rows_B, lengths_B, drafts)
        self._laws.put(batch.rows_B, drafts)
        if self._state is not None:
            self._state.drafted(batch, lengths_B, drafts, able_np)
        return drafts

    def propose_behind(self, step: Step, most: int) -> None:
        """It is done."""

    def drafts_of(self, step: Step) -> DraftTokenIds:
        names = [request.req_id for request in step.requests]
        if step.drafts is None:
            return DraftTokenIds(names, [[] for _ in names])
        tokens, counts = step.drafts.tokens_BK.tolist(), step.drafts.num_drafts_B.tolist()
        return DraftTokenIds(names, [row[:count] for row, count, _ in zip(tokens, counts, names, strict=False)])

    def _signature(self, num_rows: int, context: int, branch: Branch) -> Hashable:
        return ("draft", num_rows, context if self._state is not None else None, branch)

    def signatures(self, sampling: Sampling) -> Iterator[Hashable]:
        """Rounds of drafts by rows, context and filters; and the prompt chunks that a drafter reads."""
        branches = self._choice.branches(sampling)
        for num_rows, context, branch in product(self._shapes.decode_rows, self._shapes.contexts, branches):
            yield self._signature(num_rows, context, branch)
        if self._state is not None:
            for shape in self._shapes.all():
                if shape.phase == "prefill":
                    yield ("draft", *shape)

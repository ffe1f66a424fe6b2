"""Drafters that look at token histories on the host, behind a step's one read."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.outputs import DraftTokenIds

from vllm_gaudi_spec.proposers.base import Context, Drafts, HostProposer

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_spec.runner.batch import Batch, SampleBatch
    from vllm_gaudi_spec.runner.drafting import Draft
    from vllm_gaudi_spec.runner.followed import Followed
    from vllm_gaudi_spec.runner.report import Step
    from vllm_gaudi_spec.runner.requests import Request, Requests
    from vllm_gaudi_spec.runner.sampling import Branch, Sampling, SamplingInputs


class HostDrafting:
    def __init__(self, proposer: HostProposer, followed: Followed) -> None:
        self._proposer = proposer
        self._followed = followed
        self._drafts: dict[str, list[int]] = {}

    def apply(self, requests: Requests) -> None:
        self._followed.apply()
        for request in requests.admitted:
            self._followed.admit(request)
        if requests.ended:
            self._proposer.forget(requests.ended)

    def most(self, requests: list[Request], num_scheduled: list[int]) -> np.ndarray:
        return np.array(num_scheduled)

    def follow(self, batch: Batch) -> None:
        """It reads what the host reads."""

    def probs(self, rows_B: torch.Tensor) -> torch.Tensor | None:
        return None

    def settle(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> None:
        """The host's histories know what was accepted."""

    def propose(self, batch: SampleBatch, lengths_B: torch.Tensor, inputs: SamplingInputs, most: int) -> Drafts | None:
        return None

    def propose_behind(self, step: Step, most: int) -> None:
        self._drafts = {}
        new = self._followed.append(step)
        drafters = self._followed.drafters(step, new, most) if new else []
        if not drafters:
            return
        contexts = [
            Context(
                drafter.request.req_id,
                self._followed.tokens_np(drafter.request.row),
                drafter.request.num_prompt,
                drafter.num_wanted,
            )
            for drafter in drafters
        ]
        answers = self._proposer.propose(contexts)
        self._drafts = {
            context.req_id: list(answer) for context, answer in zip(contexts, answers, strict=True) if len(answer)
        }
        if self._drafts:
            self._followed.put(step, self._drafts)

    def drafts_of(self, step: Step) -> DraftTokenIds:
        names = [request.req_id for request in step.requests]
        return DraftTokenIds(names, [self._drafts.get(name, []) for name in names])

    def signatures(self, sampling: Sampling) -> Iterator[Hashable]:
        return iter(())

    def rounds(self, sampling: Sampling) -> Iterator[tuple[int, Branch, Draft]]:
        return iter(())

    def no_drafts(self, num_rows: int) -> Drafts | None:
        return None

    def warm_up(self) -> None:
        self._followed.warm_up()

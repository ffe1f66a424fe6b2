"""Drafters that look at token histories on the host, behind a step's one read."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import islice
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.outputs import DraftTokenIds

from vllm_gaudi_spec.drafting.base import HostProposer
from vllm_gaudi_spec.drafting.guard import Guard
from vllm_gaudi_spec.records import Context, Drafts

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_spec.drafting.followed import Drafter, Followed
    from vllm_gaudi_spec.drafting.guard import Agree
    from vllm_gaudi_spec.drafting.load import Draft
    from vllm_gaudi_spec.records import Batch, DraftRound, Request, SampleBatch, StepResult
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.sampling.params import Branch, Sampling, SamplingInputs


class HostDrafting:
    def __init__(self, proposer: HostProposer, followed: Followed, vocab_size: int, agree: Agree) -> None:
        self._proposer = proposer
        self._followed = followed
        self._vocab_size = vocab_size
        self._agree = agree
        self._guard = Guard(alone=True)  # of drafters that work on the host no rank waits for another
        self._drafts: dict[str, list[int]] = {}

    def apply(self, requests: Requests) -> None:
        self._followed.apply()
        for request in requests.admitted:
            self._followed.admit(request)
        if requests.ended:
            self._proposer.forget(requests.ended)

    def hear(self, again: list[Request], never: list[Request], *, is_off: bool) -> None:
        for request in never:
            self._followed.exclude(request.row)

    def take_rounds(self) -> list[DraftRound]:
        return self._guard.take()

    def outgrown(self) -> Collection[str]:
        return ()

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

    def propose_behind(self, step: StepResult, most: int) -> None:
        self._drafts = {}
        new = self._followed.append(step)
        drafters = self._followed.drafters(step, new, most) if new else []
        if not drafters:
            return
        asked = [drafter.request for drafter in drafters]
        drafts: dict[str, list[int]] | None = None
        faulty: list[str] = []
        try:
            drafts, faulty = self._ask(drafters)
        except Exception as error:
            self._agree(None)
            self._guard.failed(error, asked)
            return
        if not self._agree(drafts):
            self._guard.failed(RuntimeError("another rank failed, or drafted other tokens"), asked)
            return
        self._guard.done(faulty, len(asked))
        self._drafts = drafts
        if self._drafts:
            self._followed.put(step, self._drafts)

    def _ask(self, drafters: list[Drafter]) -> tuple[dict[str, list[int]], list[str]]:
        """Drafts of requests that have some, and requests whose drafts can not be used."""
        contexts = [
            Context(
                req_id=drafter.request.req_id,
                tokens_np=self._followed.tokens_np(drafter.request.row),
                num_prompt=drafter.request.num_prompt,
                num_wanted=drafter.num_wanted,
            )
            for drafter in drafters
        ]
        answers = self._proposer.propose(contexts)
        drafts: dict[str, list[int]] = {}
        faulty: list[str] = []
        for context, answer in zip(contexts, answers, strict=True):
            tokens = self._tokens(answer, context.num_wanted)
            if tokens is None:
                faulty.append(context.req_id)
            elif tokens:
                drafts[context.req_id] = tokens
        return drafts, faulty

    def _tokens(self, answer: Sequence[Any], num_wanted: int) -> list[int] | None:
        """As many as were wanted; whatever stands behind them is nobody's concern. None if they are no tokens."""
        try:
            tokens = [index(token) for token in islice(answer, num_wanted)]
        except (TypeError, ValueError):
            return None
        return tokens if all(0 <= token < self._vocab_size for token in tokens) else None

    def drafts_of(self, step: StepResult) -> DraftTokenIds:
        names = [request.req_id for request in step.requests]
        return DraftTokenIds(names, [self._drafts.get(name, []) for name in names])

    def in_use(self) -> dict[str, int]:
        return {"remembered": self._proposer.num_remembered}

    def signatures(self, sampling: Sampling) -> Iterator[Hashable]:
        return iter(())

    def rounds(self, sampling: Sampling) -> Iterator[tuple[int, Branch, Draft]]:
        return iter(())

    def no_drafts(self, num_rows: int) -> Drafts | None:
        return None

    def warm_up(self) -> None:
        self._followed.warm_up()

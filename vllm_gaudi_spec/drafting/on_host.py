"""Drafting on the host from token histories, after the device-to-host sync of a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import index
from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import DraftTokenIds

from vllm_gaudi_spec.drafting.base import Drafting
from vllm_gaudi_spec.drafting.guard import Guard
from vllm_gaudi_spec.records import Context

if TYPE_CHECKING:
    import numpy as np

    from vllm_gaudi_spec.drafting.base import HostProposer
    from vllm_gaudi_spec.drafting.guard import Agree
    from vllm_gaudi_spec.drafting.history import DraftingRow, RequestHistory
    from vllm_gaudi_spec.records import DraftRound, Request, StepResult
    from vllm_gaudi_spec.runner.requests import Requests


class HostDrafting(Drafting):
    verifies_drafts = True

    def __init__(self, proposer: HostProposer, history: RequestHistory, vocab_size: int, agree: Agree) -> None:
        self._proposer = proposer
        self._history = history
        self._vocab_size = vocab_size
        self._agree = agree
        self._guard = Guard(independent=True)  # host drafters run no collectives
        self._drafts: dict[str, list[int]] = {}

    def apply(self, requests: Requests) -> None:
        for request in requests.admitted:
            self._history.admit(request)
        if requests.ended:
            self._proposer.forget(requests.ended)

    def update_drafter_state(self, restarted: list[Request], excluded: list[Request], *, disabled: bool) -> None:
        for request in excluded:
            self._history.exclude(request.row)

    def take_rounds(self) -> list[DraftRound]:
        return self._guard.take_rounds()

    def propose_on_host(self, step: StepResult, max_drafts: int) -> None:
        self._drafts = {}
        new = self._history.append(step)
        members = self._history.select_drafting_rows(step, new, max_drafts) if new else []
        if not members:
            return
        requests = [member.request for member in members]
        try:
            drafts, faulty = self._collect_drafts(members)
        except Exception as error:
            self._agree(None)
            self._guard.record_failure(error, requests)
            return
        if not self._agree(drafts):
            self._guard.record_failure(RuntimeError("Another rank failed or drafted different tokens."), requests)
            return
        self._guard.record_round(faulty, len(requests))
        self._drafts = drafts
        self._history.keep_drafts(step, drafts)

    def host_drafts(self, requests: list[Request]) -> np.ndarray:
        return self._history.get_drafts(requests)

    def _collect_drafts(self, members: list[DraftingRow]) -> tuple[dict[str, list[int]], list[str]]:
        """Return the draft tokens for each request, and the requests with unusable drafts."""
        contexts = [
            Context(
                req_id=member.request.req_id,
                tokens_np=self._history.get_tokens(member.request.row),
                num_prompt=member.request.num_prompt,
                max_drafts=member.max_drafts,
            )
            for member in members
        ]
        outputs = self._proposer.propose(contexts)
        drafts: dict[str, list[int]] = {}
        faulty: list[str] = []
        for context, output in zip(contexts, outputs, strict=True):
            tokens = self._validate_tokens(output, context.max_drafts)
            if tokens is None:
                faulty.append(context.req_id)
            elif tokens:
                drafts[context.req_id] = tokens
        return drafts, faulty

    def _validate_tokens(self, output: Sequence[Any], max_drafts: int) -> list[int] | None:
        """Return the first `max_drafts` tokens, or None if one of them is invalid. Any further tokens are ignored."""
        try:
            tokens = [index(token) for token in islice(output, max_drafts)]
        except (TypeError, ValueError):
            return None
        return tokens if all(0 <= token < self._vocab_size for token in tokens) else None

    def get_draft_token_ids(self, step: StepResult) -> DraftTokenIds:
        names = [request.req_id for request in step.requests]
        return DraftTokenIds(names, [self._drafts.get(name, []) for name in names])

    def in_use(self) -> dict[str, int]:
        return {"remembered": self._proposer.num_remembered}

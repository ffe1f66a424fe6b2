"""Drafters that break: through vLLM's `custom_class`, and on the device. In the test's own process: a test says when
and how."""

from collections.abc import Callable
from typing import Any

import torch

from tests.full_tests.drafters import Drafter
from vllm_gaudi_spec.records import DraftRequest, Drafts

Answer = Callable[[list[list[int]]], Any]
"""From what was drafted to what is answered; it may as well raise."""


class Plan:
    """What happens in which call, counted from 0; in all others the drafter is well."""

    def __init__(self, break_at: Callable[[int], bool] = lambda call: False, answer: Answer | None = None) -> None:
        self.break_at = break_at
        self.answer = answer
        self.num_calls = 0


current = Plan()


def plan(break_at: Callable[[int], bool], answer: Answer) -> Plan:
    global current
    current = Plan(break_at, answer)
    return current


class Breaks(Drafter):
    """Drafts what followed the newest token the last time, which is right where a text loops, or breaks."""

    def draft(self, texts: list[list[int]], new: list[list[int]]) -> Any:
        call, current.num_calls = current.num_calls, current.num_calls + 1
        drafts = [_continued(text, self.k) for text in texts]
        if current.answer is not None and current.break_at(call):
            return current.answer(drafts)
        return drafts


def _continued(text: list[int], count: int) -> list[int]:
    """Never empty."""
    found = next((place for place in range(len(text) - 2, -1, -1) if text[place] == text[-1]), len(text) - 2)
    return (text[found + 1 :] * count)[:count]


class BreaksOnDevice:
    """Breaks a proposer on the device at some of its rounds."""

    def __init__(self, how: str, at: Callable[[int], bool]) -> None:
        self.how, self.at, self.num_rounds = how, at, 0

    def around(self, propose: Any) -> Any:
        def breaking(proposer: Any, request: DraftRequest, *more: Any) -> Drafts:
            drafts = propose(proposer, request, *more)
            if not bool((request.max_drafts_B > 0).any()):  # warm-up
                return drafts
            call, self.num_rounds = self.num_rounds, self.num_rounds + 1
            return getattr(self, self.how)(drafts, request) if self.at(call) else drafts

        return breaking

    def raises(self, drafts: Drafts, request: DraftRequest) -> Drafts:
        raise torch.OutOfMemoryError("injected: the drafter has no memory left")

    def ids(self, drafts: Drafts, request: DraftRequest) -> Drafts:
        return drafts._replace(tokens_BK=torch.full_like(drafts.tokens_BK, 2**31 - 1))

    def negative_ids(self, drafts: Drafts, request: DraftRequest) -> Drafts:
        return drafts._replace(tokens_BK=torch.full_like(drafts.tokens_BK, -5))

    def counts(self, drafts: Drafts, request: DraftRequest) -> Drafts:
        return drafts._replace(num_drafts_B=drafts.num_drafts_B + 100)

    def negative_counts(self, drafts: Drafts, request: DraftRequest) -> Drafts:
        return drafts._replace(num_drafts_B=drafts.num_drafts_B - 100)

    def shapes(self, drafts: Drafts, request: DraftRequest) -> Drafts:
        return drafts._replace(tokens_BK=drafts.tokens_BK[:, :-1])

"""Drafters that break, through vLLM's `custom_class`. In the test's own process: a test says when and how."""

from collections.abc import Callable
from typing import Any

import numpy as np

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
    """From now on."""
    global current
    current = Plan(break_at, answer)
    return current


class Breaks:
    """Drafts what followed the newest token the last time, which is right where a text loops, or breaks."""

    def __init__(self, vllm_config: Any) -> None:
        self.k = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *args: Any) -> None:
        """There is none."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> Any:
        call, current.num_calls = current.num_calls, current.num_calls + 1
        texts = [tokens[:length].tolist() for tokens, length in zip(token_ids_cpu, num_tokens_no_spec, strict=True)]
        drafts = [_continued(text, self.k) for text in texts]
        if current.answer is not None and current.break_at(call):
            return current.answer(drafts)
        return drafts


def _continued(text: list[int], count: int) -> list[int]:
    """Never empty."""
    found = next((place for place in range(len(text) - 2, -1, -1) if text[place] == text[-1]), len(text) - 2)
    return (text[found + 1 :] * count)[:count]

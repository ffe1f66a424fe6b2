"""Drafters for the tests, through vLLM's `custom_class`. The engine runs in the test's own process, so a test sets the
script before it opens the engine and reads the calls behind it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

Write = Callable[[list[int], int], list[int]]
"""From a row's tokens so far, and k, to its drafts."""


@dataclass
class Script:
    write: Write
    calls: list[list[tuple[tuple[int, ...], list[int]]]] = field(default_factory=list)
    """Per call and row: the tokens that the drafter saw, and what it drafted."""

    def rows(self) -> list[tuple[tuple[int, ...], list[int]]]:
        return [row for call in self.calls for row in call]


current = Script(lambda context, k: [])


def play(write: Write) -> Script:
    """From now on, draft what `write` says."""
    global current
    current = Script(write)
    return current


class Scripted:
    """Upstream's interface of a custom drafter."""

    def __init__(self, vllm_config: Any) -> None:
        self.k = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *args: Any) -> None:
        """Upstream calls it; there is nothing to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        drafts, call = [], []
        for row, sampled in enumerate(sampled_token_ids):
            if not sampled:  # upstream passes rows that have not sampled yet
                drafts.append([])
                continue
            context = token_ids_cpu[row, : num_tokens_no_spec[row]].tolist()
            assert context[-len(sampled) :] == list(sampled), "the newest tokens should end the context"
            drafts.append(current.write(context, self.k))
            call.append((tuple(context), list(drafts[-1])))
        current.calls.append(call)
        return drafts


class Repeating(Scripted):
    """The text goes on as it did `PERIOD` tokens ago. It needs no script, and so runs in any process."""

    PERIOD = 2

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        ends = [int(end) for end in num_tokens_no_spec[: len(sampled_token_ids)]]
        recent = [token_ids_cpu[row, max(end - self.PERIOD, 0) : end].tolist() for row, end in enumerate(ends)]
        return [
            (last * self.k)[: self.k] if sampled else []
            for last, sampled in zip(recent, sampled_token_ids, strict=True)
        ]


@dataclass(frozen=True)
class Record:
    """What the target says: prompts and what follows them. No prompt may begin another's text."""

    texts: list[list[int]]

    @classmethod
    def of(cls, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> "Record":
        return cls([prompt + output for prompt, output in zip(prompts, outputs, strict=True)])

    def row(self, context: list[int]) -> int:
        """Which text goes on from this context."""
        rows = [row for row, text in enumerate(self.texts) if context == text[: len(context)]]
        assert len(rows) == 1, f"{len(rows)} records begin with this context of {len(context)}: not what was recorded"
        return rows[0]

    def next(self, context: list[int], count: int) -> list[int]:
        return self.texts[self.row(context)][len(context) : len(context) + count]

    def next_if_known(self, context: list[int], count: int) -> list[int]:
        """Nothing where the target went another way, as under a mask that the record was made without."""
        rows = [text for text in self.texts if context == text[: len(context)]]
        return rows[0][len(context) : len(context) + count] if rows else []

    def advances(self, script: Script) -> list[tuple[int, int]]:
        """(tokens drafted, tokens gained) for every row and call that another call followed."""
        seen: dict[int, list[tuple[int, int]]] = {}
        for call in script.calls:
            for context, drafted in call:
                seen.setdefault(self.row(list(context)), []).append((len(context), len(drafted)))
        return [
            (drafted, later - length) for steps in seen.values() for (length, drafted), (later, _) in pairwise(steps)
        ]

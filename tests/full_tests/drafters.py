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


class Drafter:
    """Upstream's interface of a custom drafter, which hands arrays over; here it drafts from texts."""

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
    ) -> Any:
        rows = range(len(sampled_token_ids))
        return self.draft([token_ids_cpu[row, : num_tokens_no_spec[row]].tolist() for row in rows], sampled_token_ids)

    def draft(self, texts: list[list[int]], new: list[list[int]]) -> Any:
        """`new`: what of each row's text was sampled last; empty where upstream passes a row that has not sampled."""
        raise NotImplementedError


class Scripted(Drafter):
    def draft(self, texts: list[list[int]], new: list[list[int]]) -> list[list[int]]:
        drafts, call = [], []
        for context, sampled in zip(texts, new, strict=True):
            if not sampled:
                drafts.append([])
                continue
            assert context[-len(sampled) :] == list(sampled), "the newest tokens should end the context"
            drafts.append(current.write(context, self.k))
            call.append((tuple(context), list(drafts[-1])))
        current.calls.append(call)
        return drafts


class Repeating(Drafter):
    """The text goes on as it did `PERIOD` tokens ago. It needs no script, and so runs in any process."""

    PERIOD = 2

    def draft(self, texts: list[list[int]], new: list[list[int]]) -> list[list[int]]:
        rows = zip(texts, new, strict=True)
        return [(text[-self.PERIOD :] * self.k)[: self.k] if sampled else [] for text, sampled in rows]


@dataclass(frozen=True)
class Record:
    """What the target says: prompts and what follows them. No prompt may begin another's text."""

    texts: list[list[int]]

    @classmethod
    def of(cls, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> "Record":
        return cls([prompt + output for prompt, output in zip(prompts, outputs, strict=True)])

    def row(self, context: list[int]) -> int:
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

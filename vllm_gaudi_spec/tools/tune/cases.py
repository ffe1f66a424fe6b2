"""The cases of a choice: each run once, in a process of its own, and stored for the next time."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_gaudi_spec.quantization.files import replace
from vllm_gaudi_spec.tools.tune.acceptance import Acceptance, Counts
from vllm_gaudi_spec.tools.tune.child import run_module
from vllm_gaudi_spec.tools.tune.costs import StepCost


@dataclass(frozen=True)
class Answer:
    context: int
    """Tokens of KV that a request has, on average."""
    acceptance: dict[int, Acceptance]
    costs: tuple[StepCost, ...]

    @classmethod
    def read(cls, written: dict[str, Any]) -> Answer:
        return cls(
            written["context"],
            {
                int(k): Acceptance(int(k), tuple(_counts(counts) for counts in requests))
                for k, requests in written["acceptance"].items()
            },
            tuple(StepCost(**cost) for cost in written["costs"]),
        )


def _counts(written: dict[str, Any]) -> Counts:
    return Counts(**(written | {"accepted": tuple(written["accepted"])}))


@dataclass(frozen=True)
class Cases:
    """Answers are stored in `folder` under names that depend on the whole task: a changed task is measured again."""

    folder: Path
    log: Callable[[str], None]
    more: Callable[[int], None]
    """Called with the number of new answers."""

    def answer(self, name: str, task: dict[str, Any]) -> Answer:
        found = self._answer(name, task)
        self.more(1)
        return found

    def _answer(self, name: str, task: dict[str, Any]) -> Answer:
        self.folder.mkdir(parents=True, exist_ok=True)
        stored = self.folder / f"{name}-{_digest(task)}.json"
        if stored.exists():
            self.log("      kept from an earlier run")
            return Answer.read(json.loads(stored.read_text()))
        started = time.monotonic()
        written = run_module("vllm_gaudi_spec.tools.tune.case", task, self.folder / f"{name}.log")
        replace(stored, json.dumps(written).encode())
        self.log(f"      {time.monotonic() - started:.0f} s")
        return Answer.read(written)


def _digest(task: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()[:12]

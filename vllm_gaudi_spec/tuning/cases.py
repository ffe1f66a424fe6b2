"""The cases of a choice: each run once, in a process of its own, and kept for the next time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_gaudi_spec.config import environment_of_children
from vllm_gaudi_spec.tuning.acceptance import Acceptance, Counts
from vllm_gaudi_spec.tuning.costs import StepCost


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
    """Answers lie in `folder` under names that follow from all that was asked: what changes is measured anew."""

    folder: Path
    say: Callable[[str], None]

    def answer(self, name: str, task: dict[str, Any]) -> Answer:
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = self.folder / f"{name}-{_digest(task)}.json"
        if kept.exists():
            self.say("      kept from an earlier run")
            return Answer.read(json.loads(kept.read_text()))
        started = time.monotonic()
        written = run_module("vllm_gaudi_spec.tuning.case", task, self.folder / f"{name}.log")
        scratch = kept.with_suffix(".part")
        scratch.write_text(json.dumps(written) + "\n")
        os.replace(scratch, kept)
        self.say(f"      {time.monotonic() - started:.0f} s")
        return Answer.read(written)


def run_module(module: str, task: dict[str, Any], log: Path, python: str = sys.executable) -> dict[str, Any]:
    """`python -m MODULE TASK ANSWER` in a process of its own. ValueError with its reason where it fails."""
    # Else one who is told to stop would leave its child running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder, log.open("w") as file:
        asked, answer = Path(folder) / "task.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(task))
        child = subprocess.Popen(
            [python, "-m", module, str(asked), str(answer)],
            env=environment_of_children(),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            child.wait()
        finally:
            # With it goes what it started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        written: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {}
    if child.returncode or "error" in written:
        reason = written.get("error", f"its process ended with {child.returncode}")
        raise ValueError(f"{reason} (log: {log})")
    return written


def fingerprint(folder: str) -> list[list[Any]]:
    """What tells whether a model's files are the same; nothing for a name on a hub."""
    path = Path(folder)
    files = sorted(path.iterdir()) if path.is_dir() else []
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _digest(task: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()[:12]

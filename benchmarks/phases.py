"""Where the host's time in a step goes: the runner's own functions, each without those that it calls."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_gaudi_spec.runner import model_runner, report

PHASES = (
    "apply",
    "plan",
    "build and upload",
    "forward call",
    "prepare sampling",
    "finish call",
    "draft",
    "report",
    "rest",
    "wait",
)
"""In the order of a step. `wait` is for the device, and no work of the host."""


class Phases:
    """Adds up seconds by phase while it is open, in whatever thread."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._open = threading.local()

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, Counter()
        return dict(taken)

    def timed(self, work: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            inner, self._open.inner = getattr(self._open, "inner", 0.0), 0.0
            started = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - started
                self.seconds[phase] += seconds - self._open.inner
                self._open.inner = inner + seconds

        return run

    @contextmanager
    def watching(self, runner: Any) -> Iterator[Phases]:
        before = []
        for owner, name, phase in _functions(runner):
            # What an object has of its class is put back by removing it.
            before.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, self.timed(getattr(owner, name), phase))
        download = runner.backend.memory.start_download
        runner.backend.memory.start_download = lambda tensor: self.timed(download(tensor), "wait")
        try:
            yield self
        finally:
            del runner.backend.memory.start_download
            for owner, name, original in before:
                if original is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


def _functions(runner: Any) -> Iterator[tuple[Any, str, str]]:
    yield runner, "execute_model", "rest"
    yield runner, "sample_tokens", "rest"
    yield runner, "apply", "apply"
    yield model_runner, "plan_batches", "plan"
    yield model_runner, "make_batch", "build and upload"
    yield runner, "forward", "forward call"
    yield model_runner, "make_sample_batch", "prepare sampling"
    yield runner.sampling, "branch", "prepare sampling"
    yield runner.sampling, "inputs_of", "prepare sampling"
    yield runner, "_run_finish", "finish call"
    yield runner, "send", "report"
    yield report.Report, "get_output", "report"
    yield runner.backend.memory, "download", "wait"
    if runner.drafting is not None:
        for name in ("follow", "propose", "propose_on_host"):
            yield runner.drafting, name, "draft"

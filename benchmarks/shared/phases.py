"""Break down the host's time in a step by the runner's functions, each without the functions that it calls.

On a CPU, these are the times that the parts of a step take. On a card, a call only launches its graph, and the host
waits for the card in a separate phase.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import vllm_gaudi_spec.runner.model_runner as model_runner
from vllm_gaudi_spec.runner.report import Report

WAIT = "wait"
"""The phase in which the host waits for the device."""
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
    WAIT,
)
"""The phases of a step in order."""


class Phases:
    """Collects the seconds of each phase, in any thread, while a runner is watched."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._thread = threading.local()

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def timed(self, work: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            callers: list[str] = self._thread.__dict__.setdefault("callers", [])
            self._charge(callers)
            callers.append(phase)
            try:
                return work(*args, **kwargs)
            finally:
                self._charge(callers)
                callers.pop()

        return run

    def _charge(self, callers: list[str]) -> None:
        """Add the time since the last call or return to the function that was running."""
        now = time.perf_counter()
        if callers:
            self._seconds[callers[-1]] += now - self._thread.since
        self._thread.since = now

    @contextmanager
    def watching(self, runner: Any) -> Iterator[Phases]:
        before = []
        for owner, name, phase in _functions(runner):
            before.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, self.timed(getattr(owner, name), phase))
        download = runner.backend.memory.start_download
        runner.backend.memory.start_download = lambda tensor: self.timed(download(tensor), WAIT)
        try:
            yield self
        finally:
            del runner.backend.memory.start_download
            for owner, name, original in reversed(before):
                if original is None:  # the object inherited the function from its class
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


def _functions(runner: Any) -> Iterator[tuple[Any, str, str]]:
    yield runner, "execute_model", "rest"
    yield runner, "sample_tokens", "rest"
    yield runner, "apply", "apply"
    yield model_runner, "plan_batches", "plan"
    yield runner.requests, "make_batch", "build and upload"
    yield runner, "forward", "forward call"
    yield model_runner, "make_sample_batch", "prepare sampling"
    yield runner.sampling, "branch", "prepare sampling"
    yield runner.sampling, "make_pass", "prepare sampling"
    yield runner.device_step, "finish", "finish call"
    yield runner.reports, "send", "report"
    yield Report, "get_output", "report"
    yield runner.backend.memory, "download", WAIT
    if runner.speculation is not None:
        for name in ("follow", "propose", "propose_on_host"):
            yield runner.drafting, name, "draft"

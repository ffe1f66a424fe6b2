"""Break down the host's time in a step: the runner's own functions, each without those that it calls.

On a CPU, which computes what it calls, these are the times of the step's parts; on a card a call hands its graph over,
and what the host waits for the card is a phase of its own.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, NamedTuple

import vllm_gaudi_spec.runner.model_runner as model_runner
from vllm_gaudi_spec.records import DECODE
from vllm_gaudi_spec.runner.report import Report

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
"""The phases of a step in order. In `wait` the host waits for the device."""
ENGINE = "engine"
"""The time between the runner's functions: vLLM's scheduler and output, and messages between processes."""
PARTS = {
    "prepare": ("apply", "plan", "build and upload", "prepare sampling", "rest"),
    "forward": ("forward call",),
    "verify": ("finish call",),
    "draft": ("draft",),
    "report": ("report", "wait"),
}
"""Maps the parts of a step, as the report page names them, to their phases."""
_PART_OF = {phase: part for part, phases in PARTS.items() for phase in phases}


class Segment(NamedTuple):
    phase: str
    start: float
    end: float


@dataclass
class Step:
    start: float
    batches: list[tuple[str, int, int]] = field(default_factory=list)
    """Phase of the requests, number of requests, and tokens per request, for each batch."""


class Phases:
    """Collects the phases that run while it is watching, in any thread."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.steps: list[Step] = []
        self._open = threading.local()

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        taken, self.segments, self.steps = self.segments, [], []
        seconds: dict[str, float] = defaultdict(float)
        for segment in taken:
            seconds[segment.phase] += segment.end - segment.start
        return dict(seconds)

    def timed(self, work: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            callers: list[str] = self._open.__dict__.setdefault("callers", [])
            self._cut(callers)
            callers.append(phase)
            try:
                return work(*args, **kwargs)
            finally:
                self._cut(callers)
                callers.pop()

        return run

    def _cut(self, callers: Sequence[str]) -> None:
        """End the segment of the running function and begin the next one."""
        now = time.perf_counter()
        if callers:
            self.segments.append(Segment(callers[-1], self._open.since, now))
        self._open.since = now

    def _begins(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.steps.append(Step(time.perf_counter()))
            return work(*args, **kwargs)

        return run

    def _plans(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            planned = work(*args, **kwargs)
            self.steps[-1].batches = [
                (one.shape.phase, len(one.requests), one.shape.queries) for one in planned if one.requests
            ]
            return planned

        return run

    @contextmanager
    def watching(self, runner: Any) -> Iterator[Phases]:
        before = []
        for owner, name, wrap in self._wrapped(runner):
            # What an object has of its class is put back by removing it.
            before.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, wrap(getattr(owner, name)))
        download = runner.backend.memory.start_download
        runner.backend.memory.start_download = lambda tensor: self.timed(download(tensor), "wait")
        try:
            yield self
        finally:
            del runner.backend.memory.start_download
            for owner, name, original in reversed(before):
                if original is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)

    def _wrapped(self, runner: Any) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        for owner, name, phase in _functions(runner):
            yield owner, name, lambda work, phase=phase: self.timed(work, phase)
        yield model_runner, "plan_batches", self._plans
        yield runner, "execute_model", self._begins

    def typical_step(self) -> dict[str, Any] | None:
        """Return the decode step of median duration among those with the most requests and tokens, or None.

        A step lasts from its begin to the next one's.
        """
        windows = [
            (step.start, after.start, step.batches[0])
            for step, after in zip(self.steps, self.steps[1:], strict=False)
            if len(step.batches) == 1 and step.batches[0][0] == DECODE
        ]
        if not windows:
            return None
        largest = max(batch[1:] for _, _, batch in windows)
        alike = [(end - start, start, end) for start, end, batch in windows if batch[1:] == largest]
        _, start, end = next(one for one in alike if one[0] == median_low(seconds for seconds, _, _ in alike))
        ran = sorted((one for one in self.segments if start <= one.start < end), key=lambda one: one.start)
        parts = [(_PART_OF[one.phase], one.start - start, min(one.end, end) - start) for one in ran]
        parts += [(ENGINE, *gap) for gap in _gaps(parts, end - start)]
        return {
            "requests": largest[0],
            "tokens": largest[1],
            "seconds": end - start,
            "parts": [{"part": part, "start": begun, "end": ended} for part, begun, ended in parts],
        }


def _gaps(parts: Sequence[tuple[str, float, float]], whole: float) -> Iterator[tuple[float, float]]:
    at = 0.0
    for _, start, end in parts:
        if start > at:
            yield at, start
        at = max(at, end)
    if whole > at:
        yield at, whole


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
    yield runner.device_step, "finish", "finish call"
    yield runner, "send", "report"
    yield Report, "get_output", "report"
    yield runner.backend.memory, "download", "wait"
    if runner.drafting is not None:
        for name in ("follow", "propose", "propose_on_host"):
            yield runner.drafting, name, "draft"


class StepTimes:
    """A `worker_extension_cls`, called by `collective_rpc`. It changes nothing before `watch_steps`."""

    model_runner: Any

    def watch_steps(self) -> None:
        self._watched = ExitStack()
        self._phases = self._watched.enter_context(Phases().watching(self.model_runner))

    def watched_step(self) -> dict[str, Any] | None:
        """Stop watching, and return the typical step since `watch_steps`."""
        self._watched.close()
        return self._phases.typical_step()

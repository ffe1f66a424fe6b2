"""What decode steps cost by batch size, timed on a running engine: plain ones, and those that verify and draft."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_spec.records import DECODE
from vllm_gaudi_spec.tools.tune.acceptance import ask

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_gaudi_spec.records import Planned

_PLAIN_TOKENS = 16
MAX_TIMED_TOKENS = 48
"""Of a request whose steps are timed."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step of `batch` requests, the host's work included. A step is timed from its beginning to the
    beginning of the next."""

    batch: int
    plain_s: float
    """Without drafts: what an engine without speculation takes."""
    verify_s: float
    """With drafts, without the time to make them."""
    draft_s: float

    def step_s(self, verifying: float) -> float:
        """The mean step, where this share of the steps verifies."""
        return verifying * self.verify_s + (1 - verifying) * self.plain_s + self.draft_s


def cost_at(costs: Sequence[StepCost], batch: int) -> StepCost:
    """Interpolated between two measured batch sizes; outside of them, that of the nearest."""
    sizes = [cost.batch for cost in costs]
    index = bisect_left(sizes, batch)
    if index in (0, len(costs)):
        return costs[min(index, len(costs) - 1)]
    low, high = costs[index - 1], costs[index]
    share = (batch - low.batch) / (high.batch - low.batch)
    names = ("plain_s", "verify_s", "draft_s")
    mixed = {name: (1 - share) * getattr(low, name) + share * getattr(high, name) for name in names}
    return StepCost(batch, **mixed)


class _Step(NamedTuple):
    rows: int
    """Of a step that does anything but decode: none."""
    queries: int
    seconds: float
    draft: float


class Clock:
    """Times the steps of a runner in this process, and the drafter in them: a `StepObserver`."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._begun: float | None = None
        self._rows = self._queries = 0
        self._draft = 0.0

    def take(self) -> list[_Step]:
        """The steps since the last call. The newest ends now."""
        self._end_step()
        taken, self._steps = self._steps, []
        return taken

    # --- what the runner calls ---

    def step_begins(self) -> None:
        self._end_step()
        self._begun = time.perf_counter()

    def step_planned(self, scheduled: SchedulerOutput, batches: Sequence[Planned]) -> None:
        shapes = [batch.shape for batch in batches]
        if len(shapes) == 1 and shapes[0].phase == DECODE and not scheduled.scheduled_new_reqs:
            self._rows, self._queries = len(scheduled.num_scheduled_tokens), shapes[0].queries

    @contextmanager
    def drafting(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._draft += time.perf_counter() - started

    def _end_step(self) -> None:
        if self._begun is not None:
            seconds = time.perf_counter() - self._begun
            self._steps.append(_Step(self._rows, self._queries, seconds, self._draft))
        self._begun, self._rows, self._queries, self._draft = None, 0, 0, 0.0


def measure(
    llm: LLM, clock: Clock, prompts: list[list[int]], num_drafts: int, batch: int, turns: int, temperature: float
) -> StepCost:
    """Requests with drafts and without take turns, so that a slow minute of the machine meets both."""
    asked = [prompts[i % len(prompts)] for i in range(batch)]
    steps: list[_Step] = []
    clock.take()
    for _ in range(turns):
        for tokens, drafts in ((_PLAIN_TOKENS, 0), (MAX_TIMED_TOKENS, num_drafts))[: 1 + bool(num_drafts)]:
            ask(llm, asked, tokens, drafts, temperature)
            steps += steady(clock.take(), batch)
    return cost_of(steps, batch)


def steady(steps: list[_Step], batch: int) -> list[_Step]:
    """Decode steps of `batch` requests between two others: the engine waited for nothing."""
    triples = zip(steps, steps[1:], steps[2:], strict=False)
    return [step for before, step, after in triples if before.rows == step.rows == after.rows == batch]


def cost_of(steps: list[_Step], batch: int) -> StepCost:
    """Medians. Where a drafter never made a draft, the cost of a verify step is that of a plain one."""
    plain = [step for step in steps if step.queries == 1]
    verify = [step for step in steps if step.queries > 1]
    if not plain:
        raise ValueError(
            f"no step decoded {batch} requests at once, so none could be timed: there is not enough KV cache for them, "
            "or their prompts take too many steps; try smaller --batches, or shorter prompts"
        )
    # A lookup without a match, or a head's prefill, is not a part of a step without speculation.
    plain_s = median(step.seconds - step.draft for step in plain)
    if not verify:
        return StepCost(batch, plain_s, plain_s, median(step.draft for step in plain))
    return StepCost(
        batch,
        plain_s,
        median(step.seconds - step.draft for step in verify),
        median(step.draft for step in verify),
    )

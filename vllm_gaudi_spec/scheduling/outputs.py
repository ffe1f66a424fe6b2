"""What a scheduler and its workers send each other with a step: vLLM's records with fields of ours, pickled between
processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_gaudi_spec.records import DraftRound, WorkerCounts
from vllm_gaudi_spec.scheduling import metrics

# --- from the scheduler ---


class DrafterStatus(NamedTuple):
    """What follows for the workers from faults of the drafter."""

    restarted: tuple[str, ...]
    """Requests for which the drafter starts anew: what it has read of them is not to be relied on."""
    excluded: tuple[str, ...]
    """Requests that draft no more."""
    is_off: bool
    num_faults: int
    """Rounds with drafts that could not be used, so far."""


class Pace(NamedTuple):
    """What has to be known of a paced step when it is done."""

    num_rows: int
    drafted: bool
    """Whether drafts were to be made after the step before, for this one to verify."""
    drafts: bool
    """Whether they are to be made after this one."""
    only_decodes: bool


@dataclass
class SpecSchedulerOutput(SchedulerOutput):
    """A step, and how far to draft after it."""

    max_drafts: dict[str, int] = field(default_factory=dict)
    """The most drafts of each request after this step; of one that is not named `num_spec_tokens_to_schedule`."""
    drafter_status: DrafterStatus | None = None
    """None if nothing has changed."""
    skip_reason: str = metrics.LOAD
    """Why nobody drafts after this step, if `num_spec_tokens_to_schedule` is 0: one of `metrics.REASONS`."""
    pace: Pace | None = None
    """For the scheduler, when the step is done; None if nothing paced it."""


# --- from a worker ---


@dataclass
class CountedOutput(ModelRunnerOutput):
    worked: WorkerCounts | None = None


@dataclass
class SpeculativeOutput(CountedOutput):
    num_real_drafts: dict[str, int] = field(default_factory=dict)
    """How many drafts of each request were verified; the scheduler knows only how many places it scheduled."""
    started: tuple[str, ...] = ()
    """Requests whose prompt ended in this step, or that were resumed."""
    why: dict[str, str] = field(default_factory=dict)
    """Of requests without drafts, the reasons that the scheduler cannot know: values of `metrics.REASONS`."""
    draft_rounds: list[DraftRound] = field(default_factory=list)
    """How the drafter did, as far as it is known since the step before."""

"""The records between a scheduler and its workers: vLLM's, with more fields, pickled between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.outputs import ModelRunnerOutput

from vllm_gaudi_spec.records import DraftRound, NoDraftReason, WorkerCounts
from vllm_gaudi_spec.upstream.scheduler_output import SchedulerOutput

# --- from the scheduler ---


class DrafterStatus(NamedTuple):
    """What the workers do about faults of the drafter."""

    restarted: tuple[str, ...]
    """Requests that the drafter reads again from the start: its state of them may be wrong."""
    excluded: tuple[str, ...]
    """Requests that are excluded from drafting."""
    is_off: bool
    num_faults: int
    """Rounds with unusable drafts, so far."""


class Pace(NamedTuple):
    """What the scheduler needs of a paced step when it is done."""

    num_rows: int
    drafted: bool
    """Whether the step before was to draft, for this one to verify."""
    drafts: bool
    """Whether this step is to draft."""
    only_decodes: bool


@dataclass
class SpecSchedulerOutput(SchedulerOutput):
    """A step, and how much to draft after it."""

    max_drafts: dict[str, int] = field(default_factory=dict)
    """The most drafts of each request after this step; `num_spec_tokens_to_schedule` for one without an entry."""
    drafter_status: DrafterStatus | None = None
    """None if it is unchanged."""
    skip_reason: str = NoDraftReason.LOAD
    """Why no request drafts after this step, if `num_spec_tokens_to_schedule` is 0: one of `metrics.REASONS`."""
    state_loads: dict[str, int] = field(default_factory=dict)
    """By request that starts from a snapshot of a recurrent state: its slot, to be read before the step's forwards."""
    state_saves: dict[str, int] = field(default_factory=dict)
    """By request whose recurrent state is to be kept: the slot to be written after them."""
    warms_up: bool = False
    """Whether nobody waits for this step, so that the worker can go on with its warm-up. It computes nothing then."""
    is_audit: bool = False
    """For the scheduler, when the step is done: whether the step's requests are an audit's."""
    pace: Pace | None = None
    """For the scheduler, when the step is done; None without pacing."""


# --- from a worker ---


@dataclass
class CountedOutput(ModelRunnerOutput):
    worked: WorkerCounts | None = None


@dataclass
class SpeculativeOutput(CountedOutput):
    num_real_drafts: dict[str, int] = field(default_factory=dict)
    """The number of verified drafts of each request; the scheduler knows only how many positions it scheduled."""
    started: tuple[str, ...] = ()
    """Requests whose prompt ended in this step, or that were resumed."""
    why: dict[str, str] = field(default_factory=dict)
    """By request without drafts: the reason, where the scheduler cannot know it, one of `metrics.REASONS`."""
    draft_rounds: list[DraftRound] = field(default_factory=list)
    """The drafting rounds that finished since the step before."""

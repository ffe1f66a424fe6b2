"""Records between the scheduler and its workers: vLLM's with more fields. They are pickled between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.outputs import ModelRunnerOutput

from vllm_gaudi_spec.records import DraftRound, NoDraftReason, WorkerCounts
from vllm_gaudi_spec.upstream.scheduler import SchedulerOutput

# --- from the scheduler ---


class DrafterStatus(NamedTuple):
    """What the workers must do about faults of the drafter."""

    restarted: tuple[str, ...]
    """Requests that the drafter must read again from the start, as its state of them may be wrong."""
    excluded: tuple[str, ...]
    """Requests that are excluded from drafting."""
    is_off: bool
    num_faults: int
    """The number of rounds with unusable drafts so far."""


class AdaptiveStep(NamedTuple):
    """The facts about a step that adaptive verification needs when the step is done."""

    batch_size: int
    """The number of rows, padded."""
    num_verified: int
    """The number of drafts per row that the previous step chose, so that this step verifies them."""
    num_drafts: int
    """The number of drafts per row that this step chose."""
    only_decodes: bool


@dataclass
class SpecSchedulerOutput(SchedulerOutput):
    """The scheduler's output for a step, and how far to draft after it."""

    drafter_status: DrafterStatus | None = None
    """None if it has not changed."""
    skip_reason: str = NoDraftReason.LOAD
    """Why no request drafts after this step, if `num_spec_tokens_to_schedule` is 0: a `NoDraftReason`."""
    loaded_blocks: list[int] = field(default_factory=list)
    """KV blocks that a KV connector fills for requests, from this step on."""
    state_loads: dict[str, int] = field(default_factory=dict)
    """Maps a request that starts from a snapshot of its recurrent state to the slot to read before the forwards."""
    state_saves: dict[str, int] = field(default_factory=dict)
    """Maps a request whose recurrent state is kept to the slot to write after the forwards."""
    is_audit: bool = False
    """Whether the step's requests are an audit's. The scheduler reads it when the step is done."""
    adaptive_step: AdaptiveStep | None = None
    """None without adaptive verification. The scheduler reads it when the step is done."""


# --- from a worker ---


@dataclass
class CountedOutput(ModelRunnerOutput):
    worked: WorkerCounts | None = None


@dataclass
class SpeculativeOutput(CountedOutput):
    num_real_drafts: dict[str, int] = field(default_factory=dict)
    """The number of verified drafts of each request. The scheduler knows only how many positions it scheduled."""
    started: tuple[str, ...] = ()
    """Requests whose prompt ended in this step, or that were resumed after a preemption."""
    why: dict[str, str] = field(default_factory=dict)
    """Maps a request without drafts to the reason, if the scheduler cannot know it: a `NoDraftReason`."""
    draft_rounds: list[DraftRound] = field(default_factory=list)
    """The drafting rounds that finished since the previous step."""

"""Extensions of the vLLM records that the scheduler and its workers exchange. They are pickled between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_gaudi_spec.records import DraftRound, NoDraftReason, WorkerCounts
from vllm_gaudi_spec.upstream.scheduler import SchedulerOutput

# --- from the scheduler ---


class DrafterStatus(NamedTuple):
    """Actions that workers must take after faults of the drafter."""

    restarted: tuple[str, ...]
    """Requests that the drafter must process again from the start, because its KV for them may be wrong."""
    excluded: tuple[str, ...]
    """Requests that are excluded from drafting."""
    is_off: bool
    num_faults: int
    """The total number of drafting results that were unusable."""


class AdaptiveStep(NamedTuple):
    """Data about a step that adaptive verification needs when the step is done."""

    batch_size: int
    """The number of rows, including padding."""
    num_verified: int
    """The number of drafts per row that this step verifies, which was chosen in the previous step."""
    num_drafts: int
    """The number of drafts per row to generate in this step."""
    only_decodes: bool


@dataclass
class SpecSchedulerOutput(SchedulerOutput):
    """The scheduler's output for a step, extended with information that drafting needs."""

    drafter_status: DrafterStatus | None = None
    """The status of the drafter, or None if it has not changed."""
    skip_reason: str = NoDraftReason.LOAD
    """The `NoDraftReason` why no request has drafts after this step, if `num_spec_tokens_to_schedule` is 0."""
    loaded_blocks: list[int] = field(default_factory=list)
    """KV blocks that a KV connector fills for requests, beginning with this step."""
    state_loads: dict[str, int] = field(default_factory=dict)
    """Slots to read before the forward passes, by request that starts from a snapshot of recurrent state."""
    state_saves: dict[str, int] = field(default_factory=dict)
    """Slots to write after the forward passes, by request whose recurrent state is saved."""
    is_audit: bool = False
    """Whether the requests in the step belong to an audit. The scheduler reads this field when the step is done."""
    adaptive_step: AdaptiveStep | None = None
    """None without adaptive verification. The scheduler reads this field when the step is done."""


# --- from a worker ---


@dataclass
class CountedOutput(ModelRunnerOutput):
    worked: WorkerCounts | None = None


@dataclass
class SpeculativeOutput(CountedOutput):
    num_real_drafts: dict[str, int] = field(default_factory=dict)
    """The number of verified drafts for each request. The scheduler knows only how many positions it scheduled."""
    started: tuple[str, ...] = ()
    """Requests whose prompt ended in this step, and requests that were resumed after a preemption."""
    why: dict[str, str] = field(default_factory=dict)
    """Maps requests without drafts to a `NoDraftReason` that the scheduler cannot determine."""
    draft_rounds: list[DraftRound] = field(default_factory=list)
    """The results of drafting that has finished since the previous step."""
    draft_token_ids: DraftTokenIds | None = None
    """The drafts for the next step. None with async scheduling, where they stay on the device."""

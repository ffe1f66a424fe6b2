"""What the runner's output tells the scheduler, and the scheduler the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_gaudi_spec.compat.patching import wrap
from vllm_gaudi_spec.scheduling import counts as draft_counts
from vllm_gaudi_spec.scheduling import health


def count_real_drafts() -> None:
    """Count the drafts that were verified, not the places that were scheduled for them.

    Reason: the scheduler counts what it scheduled, and that is padding for a request's first step and wherever a
    drafter had less to say; when steps overlap it is nothing but padding. The runner's output says in `num_real_drafts`
    how many drafts of each request it verified. Where it is absent nothing changes.
    Remove when: upstream's runner reports how many drafts it verified.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    wrap(Scheduler, "update_from_output", _read_output)
    wrap(Scheduler, "make_spec_decoding_stats", _count_drafted_step)
    wrap(RequestSpecDecodeMetrics, "observe", _observe_drafted_step)


def _read_output(original: Callable[..., Any], scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
    """For `count_real_drafts` and `watch_the_drafter`; and what `carry_own_series` carries is counted."""
    draft_counts.hear(scheduler, scheduler_output, model_runner_output)
    health.hear(scheduler, model_runner_output)
    num_real = getattr(model_runner_output, "num_real_drafts", None)
    if num_real is not None:
        # Upstream subtracts these from its counts, and from nothing else: rejected places are given back as before.
        scheduler_output.num_invalid_spec_tokens = {
            req_id: len(places) - num_real.get(req_id, 0)
            for req_id, places in scheduler_output.scheduled_spec_decode_tokens.items()
        }
    return original(scheduler, scheduler_output, model_runner_output)


def _count_drafted_step(
    original: Callable[..., Any],
    scheduler: Any,
    spec_decoding_stats: Any,
    num_draft_tokens: int,
    num_accepted_tokens: int,
    num_invalid_spec_tokens: dict[str, int] | None,
    request_id: str,
) -> Any:
    if num_draft_tokens == (num_invalid_spec_tokens or {}).get(request_id, 0):
        return spec_decoding_stats
    return original(
        scheduler, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
    )


def _observe_drafted_step(
    original: Callable[..., None], metrics: Any, num_draft_tokens: int, num_accepted: int, detailed: bool = False
) -> None:
    if num_draft_tokens:
        original(metrics, num_draft_tokens, num_accepted, detailed)


def watch_the_drafter() -> None:
    """Let whatever scheduler runs hear of drafts that could not be used, and tell the workers what follows from it.

    Reason: a fault may be seen where only one rank reads a step's result, and a step late. All ranks have to draw the
    same conclusion at the same step, and a scheduler's word is what they all get.
    Remove when: upstream has a place for what a runner wants to tell all ranks with the next step.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap(Scheduler, "update_from_output", _read_output)
    wrap(Scheduler, "_update_after_schedule", _tell_of_the_drafter)


def _tell_of_the_drafter(original: Callable[..., None], scheduler: Any, scheduler_output: Any) -> None:
    health.tell(scheduler, scheduler_output)
    original(scheduler, scheduler_output)

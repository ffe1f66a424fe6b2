"""Figures that vLLM has none of: what they are called for Prometheus, and how they get there.

All are counters. A scheduler counts, from what it decides or from what a worker's output says; vLLM's record of
speculation carries the counts to the front end, and its metrics show them (`compat.carry_own_series`). Another one is
another entry of `SERIES` and a call of `count`.
"""

from __future__ import annotations

from typing import Any

SPARED_STEPS = "vllm:gaudi_spec_spared_steps"
DRAFTER_FAULTS = "vllm:gaudi_spec_drafter_faults"
DRAFTER_SWITCHED_OFF = "vllm:gaudi_spec_drafter_switched_off"

SERIES = {
    SPARED_STEPS: "Steps that drafted nothing because it would not have paid.",
    DRAFTER_FAULTS: "Steps whose drafts could not be used: the drafter failed, or said what is no token or no number.",
    DRAFTER_SWITCHED_OFF: "1 once the drafter was switched off for good, after three such steps in a row.",
}

_COUNTS = "_gaudi_spec_counts"


def count(scheduler: Any, name: str, more: int = 1) -> None:
    assert name in SERIES, name
    counts: dict[str, int] = vars(scheduler).setdefault(_COUNTS, {})
    counts[name] = counts.get(name, 0) + more


def take(scheduler: Any) -> dict[str, int]:
    """What was counted since the last time."""
    counts: dict[str, int] = vars(scheduler).pop(_COUNTS, {})
    return counts

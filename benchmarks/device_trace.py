"""How busy a device is between decode steps: the intervals of its kernels, from torch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

LONG_GAP_US = 10.0
"""Gaps of more than this are the host's: within a captured program kernels follow each other sooner."""
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Interval = tuple[float, float]
"""Begin and end, in microseconds."""


def record(work: Callable[[], Any]) -> list[Interval]:
    """What ran on the device while `work` was done."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in _ON_DEVICE]


def gaps_of(intervals: Iterable[Interval]) -> tuple[float, list[float]]:
    """Microseconds in which something ran, and the gaps between. Intervals may overlap."""
    busy, gaps, reached = 0.0, [], None
    for begin, end in sorted(intervals):
        if reached is None:
            reached = begin
        if begin > reached:
            gaps.append(begin - reached)
            reached = begin
        busy += max(end - reached, 0.0)
        reached = max(end, reached)
    return busy, gaps


def table_of(intervals: Iterable[Interval], steps: int) -> dict[str, float]:
    """Means of a step."""
    busy, gaps = gaps_of(intervals)
    if not busy:
        raise RuntimeError("the profiler saw nothing run on the device")
    long = [gap for gap in gaps if gap > LONG_GAP_US]
    whole = busy + sum(gaps)
    return {
        "steps": steps,
        "step_us": whole / steps,
        "busy_us": busy / steps,
        "short_gaps_us": (sum(gaps) - sum(long)) / steps,
        "long_gaps_us": sum(long) / steps,
        "long_gaps": len(long) / steps,
        "longest_gap_us": max(gaps, default=0.0),
        "idle_share": sum(gaps) / whole,
        "idle_share_in_long_gaps": sum(long) / whole,
    }

"""Counters of the work on the device, per step and in total, and the source lines of operations that take time."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, fields
from typing import NamedTuple

from card_emulator.source import here

# The maximum number of steps in the report. The totals also include older steps.
_KEPT_STEPS = 4096


@dataclass(slots=True)
class Tally:
    """The counters for one step. Bytes, floating-point operations and elements are those of an ideal kernel."""

    ops: int = 0
    """Operations inside and outside graphs, except views."""
    stray_ops: int = 0
    """Operations outside graphs."""
    lazy_compiles: int = 0
    """New recipes for operations outside graphs."""
    graph_captures: int = 0
    graph_replays: int = 0
    launches: int = 0
    """Launched recipes: pending graphs that were flushed, and replays of graphs."""
    mark_steps: int = 0
    implicit_markers: int = 0
    """Launches of pending operations that were not caused by mark_step."""
    host_reads: int = 0
    syncs: int = 0
    """Explicit waits for the device."""
    dynamic_ops: int = 0
    fallbacks: int = 0
    uploads: int = 0
    upload_bytes: int = 0
    download_bytes: int = 0
    bytes_moved: int = 0
    kv_bytes_read: int = 0
    flops: int = 0
    sorts: int = 0
    sort_elements: int = 0
    float64_ops: int = 0
    collectives: int = 0
    garbage_reads: int = 0
    """Reads of values that were never computed because of compile-only mode."""
    negative_indices: int = 0
    """Operations with negative indices, which the card accepted as positions from the end."""
    late_compiles: int = 0
    """Compilations after `Device.seal` marked the end of warm-up."""

    @property
    def compiles(self) -> int:
        return self.lazy_compiles + self.graph_captures

    def add(self, other: Tally) -> None:
        for name in _FIELDS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def as_dict(self) -> dict[str, int]:
        return {"compiles": self.compiles, **{name: getattr(self, name) for name in _FIELDS}}


_FIELDS = tuple(field.name for field in fields(Tally))


class Event(NamedTuple):
    kind: str
    what: str
    where: str


class Counters:
    """The counters of the current `step` and of previous `steps`. Totals over all steps are attributes of this class,
    such as `counters.host_reads`."""

    def __init__(self) -> None:
        self.step = Tally()
        self.steps: deque[Tally] = deque(maxlen=_KEPT_STEPS)
        self.num_steps = 0
        self.events: Counter[Event] = Counter()
        self._closed = Tally()

    def event(self, kind: str, what: str, where: str | None = None) -> None:
        self.events[Event(kind, what, where or here())] += 1

    def lines(self, kind: str) -> list[str]:
        """Return the source lines of events of this kind, most frequent first."""
        return [event.where for event, _ in self.events.most_common() if event.kind == kind]

    def next_step(self) -> Tally:
        closed, self.step = self.step, Tally()
        self.steps.append(closed)
        self.num_steps += 1
        self._closed.add(closed)
        return closed

    @property
    def total(self) -> Tally:
        total = Tally()
        total.add(self._closed)
        total.add(self.step)
        return total

    def __getattr__(self, name: str) -> int:
        if name.startswith("_") or not hasattr(Tally, name):
            raise AttributeError(name)
        value: int = getattr(self.total, name)
        return value

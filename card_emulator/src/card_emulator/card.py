"""The emulated card of a process: its model, settings, counters, memory, and current graph capture."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import torch

from card_emulator.counters import Counters, Tally
from card_emulator.queue import Queue
from card_emulator.source import here

logger = logging.getLogger(__name__)

GIB = 1 << 30


class DeviceRefusal(RuntimeError):
    """Raised where a real device would fail or would silently compute something else."""


@dataclass(frozen=True)
class Model:
    """Properties of a card model, such as Gaudi 2."""

    name: str
    device_type: str
    """The name of the device type in torch."""
    dispatch_key: str
    guard_slot: int
    """The number of the device type in torch's ABI (c10::DeviceType)."""
    count: int
    """The number of cards that a process sees. A process uses only one of them."""
    memory: int
    """The number of bytes that programs can allocate."""
    out_of_memory: str
    """The vendor's out-of-memory message: a format string with the fields `nbytes` and `mib`."""
    e4m3_max: float
    """The largest float8_e4m3 value on the card. The largest value in torch is 448."""
    lacks_dtypes: frozenset[torch.dtype]
    lacks: Callable[[str, str], bool]
    """Whether the card has no kernel for an operation, given the operation's packet name and overload name."""
    check_reach: Callable[[str, torch.Tensor], None]
    """A function that takes an operation's packet name and an operand, and rejects the operand if it is too large for
    the engine that runs the operation."""
    negative_index: str
    """The reason that the error states when a negative index is rejected."""
    counts_from_the_end: bool
    """Whether negative indices are accepted, as positions relative to the end. Every use is counted."""
    downloads_late: bool
    """Whether a copy to unpinned host memory may still be incomplete when an event recorded after it has completed."""
    queue: Callable[[Device], Queue]
    """A function that creates the queue for operations outside graphs."""


class Recording(Protocol):
    """Interface of a graph capture in progress, which `program.Capture` implements."""

    what: str
    """The name of this kind of capture in messages."""

    def record(self, operation: Any) -> None: ...

    def record_kernel(self, run: Callable[..., Any], args: Sequence[Any]) -> None: ...

    def check_collective(self, name: str) -> None: ...

    def mark_step(self) -> None: ...


@dataclass
class GraphRecord:
    """A captured graph, as listed in the report."""

    name: str
    key: str
    where: str
    ops: int
    nbytes: int
    recipes: int = 1
    """The number of recipes in the graph. Identical recipes are compiled only once."""
    replays: int = 0


class Allocation:
    """The memory of a storage. All tensors that use the storage share this object. When the last of them is deleted,
    the memory is freed."""

    __slots__ = ("__weakref__", "kv", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.kv = False
        DEVICE.allocate(nbytes)

    def __del__(self) -> None:
        # At interpreter exit, this module's globals may already be None when the last tensor is freed.
        if DEVICE is not None:
            DEVICE.in_use -= getattr(self, "nbytes", 0)  # missing if `copy` created the object without its attributes


class Device:
    def __init__(self) -> None:
        self.installed = False
        self.lazy = False
        self.pid = 0
        self.in_use = 0
        self.peak = 0
        self.acquire: Callable[[], None] | None = None
        """A function that claims the card for this process or raises an error."""

    def configure(self, model: Model, lazy: bool) -> None:
        self.model = model
        self.lazy = lazy
        self.where = torch.device(model.device_type, 0)
        self.reset()

    @property
    def generation(self) -> str:
        return self.model.name

    def reset(self) -> None:
        """Restore the settings and counters of a fresh installation. Tensors and captured graphs are kept."""
        self.counters = Counters()
        self.queue = self.model.queue(self)
        self._recording = threading.local()
        self.graphs: list[GraphRecord] = []
        self.graph_bytes = 0
        self.graphs_held = 0
        self.graph_recipes: set[int] = set()
        """Distinct recipes of captured graphs."""
        self.operators: set[tuple[str, str]] = set()
        """The name of each operator in a captured graph or compiled region, and the dtype of an operand. Views are
        omitted."""
        # Whether graphs may contain collectives. On a Gaudi, this requires PT_HPU_ENABLE_LAZY_COLLECTIVES.
        self.lazy_collectives = False
        # Whether to reject operations that are known to fail on some cards or releases, even if they work on others.
        self.hostile = True
        # Whether the runtime prints its log to the console, where it gets mixed with results (ENABLE_CONSOLE).
        self.console = False
        self.communicators: set[str] = set()
        """Names of process groups whose communicators exist, because they have run a collective."""
        self.late: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Pending copies to unpinned host memory, as pairs of the destination and its values. They complete when the
        program synchronizes with the whole card."""
        self.strict = False
        self.sealed = False
        self.graph_reserve: int | None = None
        self.allow_fallbacks = True
        self.compile_only = False
        """Whether graphs are recorded without computing anything."""
        self.bridge_flags: dict[str, Any] = {}
        self.concatenations: dict[Hashable, tuple[bool, str]] = {}
        """Maps the cache key of a concatenation outside compiled regions to two facts about the first concatenation
        with this key: whether it was along the last dimension, and its source line. Used in compiled mode."""
        self.generator = torch.Generator()
        self.generator.manual_seed(0)
        self.blocked: str | None = None

    @property
    def capture(self) -> Recording | None:
        """The calling thread's current graph capture, or None. Other threads may synchronize with the card during
        it."""
        return getattr(self._recording, "capture", None)

    @capture.setter
    def capture(self, capture: Recording | None) -> None:
        self._recording.capture = capture

    def choose(self, index: int) -> None:
        """Select the card that this process uses. It cannot be changed after the card is opened."""
        if index != self.where.index and (self.pid or not 0 <= index < self.model.count):
            raise RuntimeError(f"a process has one device, {self.where}; {self.where.type}:{index} was requested")
        self.where = torch.device(self.where.type, index)

    def opened(self) -> None:
        """Open the card on first use. Child processes forked after that cannot use the card."""
        if not self.pid:
            if self.acquire is not None and self.hostile:
                self.acquire()
            self.pid = os.getpid()

    # -- memory --

    @property
    def memory_limit(self) -> int:
        return self.model.memory

    @memory_limit.setter
    def memory_limit(self, value: int) -> None:
        """Limit the card's memory, for tests."""
        self.model = replace(self.model, memory=value)

    @property
    def e4m3_max(self) -> float:
        return self.model.e4m3_max

    def allocate(self, nbytes: int) -> None:
        self.in_use += nbytes
        self.peak = max(self.peak, self.in_use)
        if self.in_use + self.graph_bytes > self.memory_limit:
            self._no_room_for(nbytes, self.in_use - nbytes)

    def charge_graph(self, nbytes: int) -> None:
        if self.graph_reserve is not None and self.graph_bytes + nbytes > self.graph_reserve:
            # This is the message of a real card (vllm-fork, issue 257).
            self.out_of_memory(
                f"FATAL ERROR :: MODULE:PT_SYNHELPER workspace Allocation of size ::{nbytes} failed! The graph reserve "
                f"of {self.graph_reserve} bytes is used up: {self.graph_bytes} held"
            )
        if self.in_use + self.graph_bytes + nbytes > self.memory_limit:
            self._no_room_for(nbytes, self.in_use)
        self.graph_bytes += nbytes

    def out_of_memory(self, what: str) -> NoReturn:
        """Raise an out-of-memory error. A hostile card also rejects all later operations, because a Gaudi process
        cannot recover: vllm-gaudi merged and then reverted a warm-up that tried to continue (pull requests 993 and
        1078)."""
        if self.hostile:
            self.blocked = f"this process ran out of memory before: {what}"
        raise torch.OutOfMemoryError(f"emulated {self.generation}: {what}")

    def _no_room_for(self, nbytes: int, in_use: int) -> NoReturn:
        self.out_of_memory(
            f"{self.model.out_of_memory.format(nbytes=nbytes, mib=nbytes >> 20)} "
            f"({in_use} of {self.memory_limit} bytes in use, {self.graph_bytes} held by graphs)"
        )

    def mem_get_info(self) -> tuple[int, int]:
        """Return the free and total memory in bytes."""
        return self.memory_limit - self.in_use - self.graph_bytes, self.memory_limit

    # -- steps --

    def mark_step(self) -> None:
        """Compile and launch the pending operations, like the bridge's `mark_step`. Does nothing outside lazy mode."""
        if not self.lazy:
            return
        if self.capture is not None:
            self.capture.mark_step()
        else:
            self.counters.step.mark_steps += 1
            self.queue.flush("mark_step")

    def implicit_marker(self, cause: str) -> None:
        """Launch the pending operations without an explicit marker, for the given reason."""
        if self.lazy and self.capture is None and self.queue.flush(cause):
            self.counters.step.implicit_markers += 1
            self.counters.event("implicit marker", cause)

    def next_step(self) -> Tally:
        """Close the current step of the report, start the next one, and return the counts for the closed step."""
        return self.counters.next_step()

    def seal(self) -> None:
        """Mark the end of warm-up. Every later compilation is reported as late."""
        self.mark_step()
        self.sealed = True

    def compiled(self, kind: str, what: str, where: str) -> None:
        step = self.counters.step
        if kind == "lazy compile":
            step.lazy_compiles += 1
        else:
            step.graph_captures += 1
        self.counters.event(kind, what, where)
        if self.sealed:
            step.late_compiles += 1
            self.counters.event("compile after warm-up", what, where)
            logger.warning("Compiled after warm-up: %s %s at %s", kind, what, where)
            if self.strict:
                raise DeviceRefusal(f"{kind} after warm-up: {what} at {where}")

    # -- refusals and counted costs --

    def host_read(self, what: str, nbytes: int = 0) -> None:
        """Count a copy of a value to the host, which launches the pending operations."""
        self.refuse_in_capture(f"{what} reads a value on the host")
        step = self.counters.step
        step.host_reads += 1
        step.download_bytes += nbytes
        self.counters.event("device-to-host sync", what)
        self.implicit_marker(what)

    def dynamic(self, what: str) -> None:
        """Count an operation whose result has a data-dependent size, so that the host must read this size."""
        self.refuse_in_capture(f"{what} has a data-dependent shape")
        if self.compile_only:
            raise DeviceRefusal(f"{what} needs values, and compile-only mode computes none")
        self.counters.step.dynamic_ops += 1
        self.counters.event("dynamic op", what)
        self.host_read(what)

    def fallback(self, what: str) -> None:
        """Count an operation that runs on the host because the device has no kernel for it."""
        self.refuse_in_capture(f"{what} falls back to the CPU")
        if not self.allow_fallbacks:
            raise DeviceRefusal(f"{what} has no kernel on the device, and CPU fallbacks are forbidden")
        self.counters.step.fallbacks += 1
        self.counters.event("CPU fallback", what)
        self.implicit_marker(what)

    def refuse_in_capture(self, what: str) -> None:
        if self.capture is not None:
            raise DeviceRefusal(f"during {self.capture.what}: {what}, at {here()}")

    def after_fork(self) -> None:
        """Block the card in a forked child process. A real card hangs in a child if it was opened before the fork."""
        if self.installed and self.pid and self.pid != os.getpid():
            self.blocked = "this process was forked after the device was opened; start workers with spawn"


DEVICE = Device()

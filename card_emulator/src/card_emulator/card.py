"""The one emulated card of a process: what it is, its settings, its counters, its memory, and what is running on it."""

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
    """Raised where the real device would fail or silently compute something else."""


@dataclass(frozen=True)
class Model:
    """Properties in which cards differ."""

    name: str
    device_type: str
    """Torch's name of the device type."""
    dispatch_key: str
    guard_slot: int
    """Its c10::DeviceType, part of torch's ABI."""
    count: int
    """Number of cards that a process sees. It uses one."""
    memory: int
    """Bytes that the allocator offers."""
    out_of_memory: str
    """The vendor's message when memory runs out, with `nbytes` or `mib` as fields."""
    e4m3_max: float
    """Values above it do not exist in float8_e4m3 on the card; torch's own type goes to 448."""
    lacks_dtypes: frozenset[torch.dtype]
    lacks: Callable[[str, str], bool]
    """Whether the card has no kernel for an operation, given the names of its packet and its overload."""
    check_reach: Callable[[str, torch.Tensor], None]
    """Refuses an operand that is too large for the engine of an operation, given the name of its packet."""
    negative_index: str
    """The reason why a negative index is refused."""
    counts_from_the_end: bool
    """Whether negative indices count from the end; each use is counted."""
    downloads_late: bool
    """Whether events do not wait for downloads into memory that is not pinned."""
    queue: Callable[[Device], Queue]
    """Creates the queue for operations outside graphs."""


class Recording(Protocol):
    """A graph capture in progress, such as `program.Capture`."""

    what: str
    """Name of the activity in messages."""

    def record(self, operation: Any) -> None: ...

    def record_kernel(self, run: Callable[..., Any], args: Sequence[Any]) -> None: ...

    def check_collective(self, name: str) -> None: ...

    def mark_step(self) -> None: ...


@dataclass
class GraphRecord:
    """A captured graph, as shown in the report."""

    name: str
    key: str
    where: str
    ops: int
    nbytes: int
    recipes: int = 1
    """The number of recipes that the graph's operations compile to. Equal recipes are compiled once."""
    replays: int = 0


class Allocation:
    """Memory of one storage; tensors that share a storage share this object, and the last one frees it."""

    __slots__ = ("__weakref__", "kv", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.kv = False
        DEVICE.allocate(nbytes)

    def __del__(self) -> None:
        # At interpreter exit the module's names may be gone before the last tensor.
        if DEVICE is not None:
            DEVICE.in_use -= getattr(self, "nbytes", 0)  # absent in one that was copied without its contents


class Device:
    def __init__(self) -> None:
        self.installed = False
        self.lazy = False
        self.pid = 0
        self.in_use = 0
        self.peak = 0
        self.acquire: Callable[[], None] | None = None
        """Claims the card for this process, or raises an error."""

    def configure(self, model: Model, lazy: bool) -> None:
        self.model = model
        self.lazy = lazy
        self.where = torch.device(model.device_type, 0)
        self.reset()

    @property
    def generation(self) -> str:
        return self.model.name

    def reset(self) -> None:
        """Reset settings and counters to their values after installation. Tensors and captured graphs stay alive."""
        self.counters = Counters()
        self.queue = self.model.queue(self)
        self._recording = threading.local()
        self.graphs: list[GraphRecord] = []
        self.graph_bytes = 0
        self.graphs_held = 0
        self.graph_recipes: set[int] = set()
        """Distinct recipes of captured graphs."""
        self.operators: set[tuple[str, str]] = set()
        """Operators of captured graphs and compiled regions, each with a dtype of its operands; views are left out."""
        # Settings. A collective inside a graph needs PT_HPU_ENABLE_LAZY_COLLECTIVES on a Gaudi.
        self.lazy_collectives = False
        # Refuses what is known to fail on some cards or releases, though perhaps not on all.
        self.hostile = True
        # As with ENABLE_CONSOLE: the runtime writes its log where others look for answers.
        self.console = False
        self.communicators: set[str] = set()
        """Process groups that had a collective outside of graphs."""
        self.late: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Downloads into memory that is not pinned, with the values that arrive once the program has waited for the
        whole card."""
        self.strict = False
        self.sealed = False
        self.graph_reserve: int | None = None
        self.allow_fallbacks = True
        self.compile_only = False
        """Whether graphs are recorded without computing anything."""
        self.bridge_flags: dict[str, Any] = {}
        self.concatenations: dict[Hashable, tuple[bool, str]] = {}
        """Concatenations outside regions in compiled mode: maps the key of a recipe to whether the first one was along
        the last dimension, and to its line."""
        self.generator = torch.Generator()
        self.generator.manual_seed(0)
        self.blocked: str | None = None

    @property
    def capture(self) -> Recording | None:
        """The calling thread's capture. Other threads may wait for results in the meantime."""
        return getattr(self._recording, "capture", None)

    @capture.setter
    def capture(self, capture: Recording | None) -> None:
        self._recording.capture = capture

    def choose(self, index: int) -> None:
        """Choose the card of this process, for good."""
        if index != self.where.index and (self.pid or not 0 <= index < self.model.count):
            raise RuntimeError(f"a process has one device, {self.where}; {self.where.type}:{index} was asked for")
        self.where = torch.device(self.where.type, index)

    def opened(self) -> None:
        """Open the card at its first use; a fork is fatal from here on."""
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
            # The words are those of a card (vllm-fork, issue 257).
            self.out_of_memory(
                f"FATAL ERROR :: MODULE:PT_SYNHELPER workspace Allocation of size ::{nbytes} failed! The graph reserve "
                f"of {self.graph_reserve} bytes is used up: {self.graph_bytes} held"
            )
        if self.in_use + self.graph_bytes + nbytes > self.memory_limit:
            self._no_room_for(nbytes, self.in_use)
        self.graph_bytes += nbytes

    def out_of_memory(self, what: str) -> NoReturn:
        """No process goes on after it on a Gaudi: vllm-gaudi merged and reverted a warm-up that tried (pull requests
        993 and 1078)."""
        if self.hostile:
            self.blocked = f"this process ran out of memory before: {what}"
        raise torch.OutOfMemoryError(f"emulated {self.generation}: {what}")

    def _no_room_for(self, nbytes: int, in_use: int) -> NoReturn:
        self.out_of_memory(
            f"{self.model.out_of_memory.format(nbytes=nbytes, mib=nbytes >> 20)} "
            f"({in_use} of {self.memory_limit} bytes in use, {self.graph_bytes} held by graphs)"
        )

    def mem_get_info(self) -> tuple[int, int]:
        """Return the free and the total memory, as the allocator reports them."""
        return self.memory_limit - self.in_use - self.graph_bytes, self.memory_limit

    # -- steps --

    def mark_step(self) -> None:
        """Compile and launch the pending operations, as the bridge's `mark_step` does. This is a no-op outside lazy
        mode."""
        if not self.lazy:
            return
        if self.capture is not None:
            self.capture.mark_step()
        else:
            self.counters.step.mark_steps += 1
            self.queue.flush("mark_step")

    def implicit_marker(self, cause: str) -> None:
        """Cut the pending graph because something needs a value."""
        if self.lazy and self.capture is None and self.queue.flush(cause):
            self.counters.step.implicit_markers += 1
            self.counters.event("implicit marker", cause)

    def next_step(self) -> Tally:
        """Close a step for reporting; later counts belong to the next one."""
        return self.counters.next_step()

    def seal(self) -> None:
        """Mark the end of warm-up, after which every compilation is a defect."""
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
        """Cut the pending graph because a value goes to the host."""
        self.refuse_in_capture(f"{what} reads a value on the host")
        step = self.counters.step
        step.host_reads += 1
        step.download_bytes += nbytes
        self.counters.event("device-to-host sync", what)
        self.implicit_marker(what)

    def dynamic(self, what: str) -> None:
        """Count a readback, since the size of a result depends on values."""
        self.refuse_in_capture(f"{what} has a data-dependent shape")
        if self.compile_only:
            raise DeviceRefusal(f"{what} needs values, and compile-only mode computes none")
        self.counters.step.dynamic_ops += 1
        self.counters.event("dynamic op", what)
        self.host_read(what)

    def fallback(self, what: str) -> None:
        """Count an operation that runs on the host because the device has no kernel."""
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
        """Block the card in a forked child, since a real one hangs if the process opened it before the fork."""
        if self.installed and self.pid and self.pid != os.getpid():
            self.blocked = "the device was opened before this process was forked; start workers with spawn"


DEVICE = Device()

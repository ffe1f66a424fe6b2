"""The emulated card under torch_npu, as seen from Python. The emulated CANN counts events in total, and this module
assigns the counts to steps."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from card_emulator.card import GraphRecord
from card_emulator.counters import Counters, Tally


class Counts(NamedTuple):
    """The counters of the emulated CANN, in the order of its C++ function `emulated_cann_counters`."""

    launches: int
    """Operators and copies that were launched outside graphs."""
    replays: int
    replayed: int
    """Tasks in replayed graphs."""
    captures: int
    uploads: int
    upload_bytes: int
    downloads: int
    download_bytes: int
    syncs: int
    """Calls that may block the host."""
    task_updates: int
    memory: int
    graphs: int
    collectives: int
    kv_bytes_read: int
    """Bytes of paged KV that the fused attention read."""


class Card:
    generation = "Ascend910B3"
    lazy = False
    graph_recipes: tuple[()] = ()
    # Only torch_npu's allocator knows which memory belongs to a graph.
    graph_bytes = 0

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._counters = Counters()
        # Keep a reference to the callback, because C++ code calls it later.
        self._on_fallback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._fallback)
        library.emulated_cann_on_fallback(self._on_fallback)
        self._seen = self.counts()
        self.sealed = False
        self._compile_only = False

    def _fallback(self, operation: bytes) -> None:
        """Count an operation that torch_npu runs on the host. When torch_npu copies tensors to the host for it, these
        copies are also counted as device-to-host syncs."""
        self._counters.step.fallbacks += 1
        self._counters.event("CPU fallback", operation.decode())

    def counts(self) -> Counts:
        amounts = (ctypes.c_uint64 * len(Counts._fields))()
        self._library.emulated_cann_counters(amounts)
        return Counts(*amounts)

    @contextmanager
    def tracing(self) -> Iterator[list[str]]:
        """Trace the launches in a `with` block. The yielded list is filled when the block ends.

        The list contains one line for each launched operator or graph, in order. The line of a graph is followed by
        indented lines for the graph's operators.
        """
        lines: list[str] = []
        self._library.emulated_cann_trace(ctypes.c_bool(True))
        try:
            yield lines
        finally:
            self._library.emulated_cann_trace(ctypes.c_bool(False))
            size = self._library.emulated_cann_traced(None, ctypes.c_uint64(0))
            text = ctypes.create_string_buffer(size)
            self._library.emulated_cann_traced(text, ctypes.c_uint64(size))
            lines += text.raw.decode().splitlines()

    @property
    def graphs(self) -> list[GraphRecord]:
        """All graphs that were captured, including those that no longer exist."""
        number = self._library.emulated_cann_graphs(None, ctypes.c_uint64(0))
        amounts = (ctypes.c_uint64 * (2 * number))()
        self._library.emulated_cann_graphs(amounts, ctypes.c_uint64(number))
        pairs = zip(amounts[::2], amounts[1::2], strict=True)
        return [GraphRecord("NPUGraph", "", "", ops, 0, replays=replays) for ops, replays in pairs]

    @property
    def counters(self) -> Counters:
        now, before = self.counts(), self._seen
        since = Counts(*(new - old for new, old in zip(now, before, strict=True)))
        self._seen = now
        self._counters.step.add(
            Tally(
                ops=since.launches + since.replayed,
                stray_ops=since.launches,
                graph_captures=since.captures,
                graph_replays=since.replays,
                launches=since.launches + since.replays,
                host_reads=since.downloads,
                syncs=since.syncs,
                uploads=since.uploads,
                upload_bytes=since.upload_bytes,
                download_bytes=since.download_bytes,
                collectives=since.collectives,
                kv_bytes_read=since.kv_bytes_read,
                late_compiles=since.captures if self.sealed else 0,
            )
        )
        return self._counters

    def next_step(self) -> Tally:
        return self.counters.next_step()

    def seal(self) -> None:
        """Mark the end of warm-up."""
        self.next_step()
        self.sealed = True

    @property
    def compile_only(self) -> bool:
        return self._compile_only

    @compile_only.setter
    def compile_only(self, value: bool) -> None:
        """Set whether operators skip their computations."""
        self._compile_only = value
        self._library.emulated_cann_compute(ctypes.c_bool(not value))

    @property
    def in_use(self) -> int:
        return self.counts().memory

    @property
    def memory_limit(self) -> int:
        return self.mem_get_info()[1]

    @memory_limit.setter
    def memory_limit(self, value: int) -> None:
        """Limit the card's memory, for tests."""
        self._library.emulated_cann_limit_memory(ctypes.c_uint64(value))

    @property
    def graphs_held(self) -> int:
        return self.counts().graphs

    def mem_get_info(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._library.aclrtGetMemInfo(0, ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

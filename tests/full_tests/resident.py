"""Resident memory of a server's processes (RSS, as the kernel counts it), and whether it grows."""

import re
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.full_tests.server import Server

MOST_GROWTH = 0.02
WARM = 0.25
"""Of the load: what is used for the first time is allocated then."""
_MEBIBYTE = 1 << 20


def meet_every_length(server: Server, budget: int) -> None:
    """On a CPU oneDNN makes a program for each number of rows that a matrix meets, and keeps 128 of them: memory grows
    until all were met, which a mixed load takes an hour for. `budget`: of tokens in a step."""
    for length in range(1, budget + 1):
        server.complete(prompt=[2 + length] * length, max_tokens=1, temperature=0)


@dataclass(frozen=True)
class Growth:
    first: float
    last: float
    """MiB."""

    @property
    def share(self) -> float:
        return self.last / self.first - 1

    def __str__(self) -> str:
        return f"{self.first:.1f} -> {self.last:.1f} MiB, {self.share:+.2%}"


@dataclass
class Resident:
    """Of each process, sampled once a second or once a request."""

    processes: dict[str, psutil.Process]
    samples: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, server: Server) -> "Resident":
        """Once the server is ready, there are no more processes."""
        first = psutil.Process(server.process.pid)
        return cls({f"{p.name()} {p.pid}": p for p in (first, *first.children(recursive=True))})

    def sample(self) -> None:
        for name, process in self.processes.items():
            self.samples[name].append(process.memory_info().rss)

    def reset_peak(self) -> None:
        """Let `peak` begin anew (Linux)."""
        for process in self.processes.values():
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")

    def peak(self) -> float:
        """MiB of all of them, each at the most that it had since `reset_peak`."""
        statuses = [Path(f"/proc/{process.pid}/status").read_text() for process in self.processes.values()]
        return sum(int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) for status in statuses) / 1024

    @property
    def now(self) -> float:
        """MiB of all of them."""
        return sum(samples[-1] for samples in self.samples.values()) / _MEBIBYTE

    def growth(self) -> dict[str, Growth]:
        """The median of the last tenth of the samples beside that of the first tenth behind the warm ones."""
        found = {}
        for name, samples in self.samples.items():
            kept = samples[int(WARM * len(samples)) :]
            tenth = max(len(kept) // 10, 1)
            first, last = statistics.median(kept[:tenth]), statistics.median(kept[-tenth:])
            found[name] = Growth(first / _MEBIBYTE, last / _MEBIBYTE)
        return found

    def grown(self) -> list[str]:
        """The processes that have grown too much."""
        return [f"{name} grew: {growth}" for name, growth in self.growth().items() if growth.share >= MOST_GROWTH]

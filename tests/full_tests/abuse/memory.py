"""Memory of a server: what is resident of all its processes (RSS, as the kernel counts it), summed."""

import psutil

from tests.full_tests.server import Server

MEBIBYTE = 1 << 20


class Resident:
    def __init__(self, server: Server) -> None:
        first = psutil.Process(server.process.pid)
        self.family = [first, *first.children(recursive=True)]
        """Once the server is ready, there are no more."""
        self.samples: list[int] = []

    def sample(self) -> None:
        self.samples.append(sum(process.memory_info().rss for process in self.family))

    def growth(self, warm: float) -> float:
        """As a share, from where `warm` of the samples were taken: caches fill and allocators settle before."""
        after = self.samples[int(warm * len(self.samples))]
        return self.samples[-1] / after - 1

    def __str__(self) -> str:
        first, last, most = self.samples[0], self.samples[-1], max(self.samples)
        now = ", ".join(f"{process.name()} {process.memory_info().rss // MEBIBYTE}" for process in self.family)
        return f"{first // MEBIBYTE} MiB at first, {most // MEBIBYTE} at most, {last // MEBIBYTE} at last ({now})"

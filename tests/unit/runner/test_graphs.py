"""The counters that a worker reports with each step."""

from __future__ import annotations

from typing import Any

from tests.support.fakes import HostBackend
from vllm_gaudi_spec.devices.base import Graphs
from vllm_gaudi_spec.graphs import StepRecorder


class CountingBackend(HostBackend):
    def __init__(self) -> None:
        super().__init__()
        self.graphs = CountingGraphs()


class CountingGraphs(Graphs):
    """Graphs of a device that counts its own compilations."""

    num_compiled = 0
    num_asked = 0

    def compiled_after_warmup(self) -> int:
        self.num_asked += 1
        return self.num_compiled


def test_counters_start_after_warm_up() -> None:
    backend: Any = CountingBackend()
    recorder = StepRecorder()
    recorder.expect(["known"])
    backend.memory.num_host_syncs = 7
    recorder.warm_up_done(backend.memory.num_host_syncs)
    recorder.saw("known")
    recorder.step_done()
    backend.memory.num_host_syncs += 2
    assert recorder.make_counts(backend) == (1, 2, 0, {}, 0, 0)
    recorder.saw("new")
    recorder.saw("new")
    recorder.coverage = {"target": 0.5}
    recorder.count_prefill(num_tokens=100, num_computed=128)
    recorder.count_prefill(num_tokens=30, num_computed=30)
    assert recorder.make_counts(backend) == (1, 2, 1, {"target": 0.5}, 130, 28)


def test_graphs_compiled_in_warm_up_are_not_counted() -> None:
    """Steps of warm-up report too, before the device knows which graphs belong to warm-up."""
    backend: Any = CountingBackend()
    recorder = StepRecorder()
    backend.graphs.num_compiled = 186
    recorder.make_counts(backend)
    backend.graphs.num_compiled = 0
    recorder.warm_up_done(backend.memory.num_host_syncs)
    counts = []
    for _ in range(17):
        recorder.step_done()
        counts.append(recorder.make_counts(backend).compiled)
    assert not any(counts)

"""NPU graphs: capturing computes nothing, a replay reads and writes the memory that the capture saw."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_gaudi_spec.emulator import report
from vllm_gaudi_spec.emulator.card import DeviceRefusal

THIS_FILE = os.path.basename(__file__)


def npu(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to("npu")


def captured(run: Callable[[], Any], pool: Any = None) -> tuple[Any, Any]:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, pool=pool):
        result = run()
    return graph, result


def test_capturing_computes_nothing(card: Any) -> None:
    x = npu(1, 2)
    card.next_step()
    graph, y = captured(lambda: x.add_(1) * 3)
    counted = card.next_step()
    assert (counted.ops, counted.stray_ops, counted.launches, counted.graph_captures) == (0, 0, 0, 1)
    assert x.tolist() == [1, 2]
    assert y.isnan().all()
    graph.replay()
    assert x.tolist() == [2, 3]
    assert y.tolist() == [6, 9]


def test_replays_read_the_memory_of_the_capture_and_write_the_same_results(card: Any) -> None:
    x = npu(1, 2)
    graph, (y, part) = captured(lambda: ((y := x * 2), y[1:]))
    later = y[:1]
    for value in (5, 7):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [2 * value, 2 * value]
        assert part.tolist() == later.tolist() == [2 * value]
    held = y.clone()
    x.fill_(0)
    graph.replay()
    assert held.tolist() == [14, 14]
    assert y.tolist() == [0, 0]


def test_a_replay_is_one_launch_with_the_work_of_all_its_operations(card: Any) -> None:
    x = npu(*range(8))
    graph, _ = captured(lambda: (x * 2 + 1).sum())
    card.next_step()
    graph.replay()
    counted = card.next_step()
    assert (counted.graph_replays, counted.launches, counted.stray_ops, counted.ops) == (1, 1, 0, 3)
    assert card.graphs[0].replays == 1
    assert THIS_FILE in card.graphs[0].where


def test_graphs_feed_each_other(card: Any) -> None:
    x = npu(1)
    pool = torch.npu.graph_pool_handle()
    first, y = captured(lambda: x + 1, pool)
    second, z = captured(lambda: y * 10, pool)
    for value in (1, 2):
        x.fill_(value)
        first.replay()
        second.replay()
        assert z.item() == (value + 1) * 10


def test_writes_through_views_and_into_new_memory(card: Any) -> None:
    cache = torch.zeros(4, 2, device="npu")
    slots = npu(1, 3, dtype=torch.int64)

    def run() -> torch.Tensor:
        cache.view(2, 2, 2).flatten(0, 1).index_copy_(0, slots, torch.ones(2, 2, device="npu"))
        made = torch.zeros(4, device="npu")
        made[1:3].copy_(cache[1])
        return made

    graph, made = captured(run)
    assert not cache.any()
    graph.replay()
    assert cache[:, 0].tolist() == [0, 1, 0, 1]
    assert made.tolist() == [0, 1, 1, 0]


def test_random_numbers_differ_from_replay_to_replay(card: Any) -> None:
    torch.npu.manual_seed(0)
    graph, noise = captured(lambda: torch.rand(8, device="npu"))
    graph.replay()
    first = noise.tolist()
    graph.replay()
    assert noise.tolist() != first
    torch.npu.manual_seed(0)
    graph.replay()
    assert noise.tolist() == first


@pytest.mark.parametrize(
    ("forbidden", "why"),
    [
        (lambda x: x.sum().item(), "reads a value"),
        (lambda x: bool(x.any()), "reads a value"),
        (lambda x: x.cpu(), "reads a value"),
        (lambda x: x.tolist(), "reads a value"),
        (lambda x: x.nonzero(), "data-dependent shape"),
        (lambda x: x[x > 1], "data-dependent shape"),
        (lambda x: torch.ones(2).to("npu"), "a host tensor is copied"),
        (lambda x: torch.tensor([1.0], device="npu"), "a host tensor is copied"),
        (lambda x: torch.lgamma(x), "falls back to the CPU"),
        (lambda x: x.double(), "in float64 falls back to the CPU"),
        (lambda x: torch.npu.synchronize(), "waits for the device"),
        (lambda x: torch.npu.current_stream().synchronize(), "waits for the device"),
        (lambda x: torch.npu.Event().synchronize(), "an event is waited for"),
        (lambda x: torch.npu.NPUGraph().capture_begin(), "a second capture begins"),
        (lambda x: torch.npu.NPUGraph().replay(), "a graph is replayed"),
        (lambda x: torch.npu.stream(torch.npu.Stream()).__enter__(), "moves to another stream"),
    ],
)
def test_what_a_capture_refuses(card: Any, forbidden: Callable[[torch.Tensor], Any], why: str) -> None:
    x = npu(1, 2)
    with pytest.raises(DeviceRefusal, match=f"during NPU graph capture: .*{why}.*{THIS_FILE}"):
        captured(lambda: forbidden(x))
    assert (x + 1).tolist() == [2, 3]  # the capture is over, and the card computes


def test_captures_need_a_stream_of_their_own(card: Any) -> None:
    graph = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match="non-default stream"):
        graph.capture_begin()
    with pytest.raises(RuntimeError, match="Unknown capture error mode"), torch.npu.stream(torch.npu.Stream()):
        graph.capture_begin(capture_error_mode="none")
    stream = torch.npu.Stream()
    assert not torch.npu.is_current_stream_capturing()
    with torch.npu.graph(graph, stream=stream):
        assert torch.npu.is_current_stream_capturing()
        assert torch.npu.current_stream() is stream
    assert torch.npu.current_stream() is torch.npu.default_stream()


def test_a_graph_is_captured_once(card: Any) -> None:
    graph = torch.npu.NPUGraph()
    for method in (graph.replay, graph.pool):
        with pytest.raises(RuntimeError, match="without a preceding successful capture"):
            method()
    with pytest.raises(RuntimeError, match="before capture_begin"):
        graph.capture_end()
    with torch.npu.graph(graph):
        torch.zeros(1, device="npu")
    with pytest.raises(RuntimeError, match="already owns a captured graph"), torch.npu.graph(graph):
        pass
    graph.reset()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


def test_memory_that_a_graph_reads_has_to_stay(card: Any) -> None:
    held = [npu(1, 2), npu(3)]
    graph, y = captured(lambda: held[0] * held[1])
    graph.replay()
    assert y.tolist() == [3, 6]
    del held[1]
    gc.collect()
    with pytest.raises(DeviceRefusal, match=r"memory that it uses was freed: a tensor of \(1,\)"):
        graph.replay()


def test_graphs_of_a_pool_share_its_memory(card: Any) -> None:
    x = torch.zeros(1024, device="npu")
    pool = torch.npu.graph_pool_handle()

    def work(times: int) -> torch.Tensor:
        return torch.cat([x] * times).sum()

    alone = captured(lambda: work(4))
    apart = card.graph_bytes
    assert apart >= 4 * 4096
    shared = [captured(lambda times=times: work(times), pool) for times in (4, 2, 4)]
    assert card.graph_bytes == 2 * apart
    assert card.graphs_held == report.as_json(card)["graphs_held"] == 4
    assert shared[0][0].pool() is pool
    alone[0].reset()
    assert card.graph_bytes == apart
    del shared, alone
    gc.collect()
    assert card.graph_bytes == card.graphs_held == 0
    with pytest.raises(RuntimeError, match="went with its last graph"):
        captured(lambda: work(1), pool)
    card.graph_reserve = 100
    with pytest.raises(torch.OutOfMemoryError, match="graph reserve"):
        captured(lambda: work(1))


def test_results_are_memory_like_any_other(card: Any) -> None:
    x = torch.zeros(1024, device="npu")
    before = card.in_use
    _graph, results = captured(lambda: [(y := x * 2), (y + 1)[:1]])
    assert (card.in_use - before, card.graph_bytes) == (2 * x.nbytes, 0)
    del results[1]
    gc.collect()
    assert card.in_use - before == x.nbytes


def test_captures_after_warm_up_are_defects(card: Any) -> None:
    captured(lambda: torch.zeros(1, device="npu"))
    card.seal()
    assert card.counters.late_compiles == 0
    captured(lambda: torch.zeros(1, device="npu"))
    assert card.counters.late_compiles == 1
    assert THIS_FILE in card.counters.lines("compile after warm-up")[0]
    card.strict = True
    with pytest.raises(DeviceRefusal, match="graph capture after warm-up"):
        captured(lambda: torch.zeros(1, device="npu"))

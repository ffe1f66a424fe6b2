"""Task groups: operations of a graph that are told new numbers between replays, and who has to wait for whom."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from vllm_gaudi_spec import emulator
from vllm_gaudi_spec.emulator.card import DeviceRefusal

ROWS, QUERIES, HEADS, KV_HEADS, SIZE, BLOCK, WIDTH = 2, 3, 4, 2, 16, 128, 2


class Attention:
    """A graph of one fused attention, and the updates of its bounds."""

    def __init__(self, torch_npu: Any) -> None:
        self.operation = torch_npu.npu_fused_infer_attention_score
        self.place_of = torch_npu._C._weak_ref_tensor
        self.get_workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace
        self.query = torch.randn(ROWS, QUERIES, HEADS * SIZE, dtype=torch.bfloat16).to("npu")
        keys, values = torch.randn(2, 8, BLOCK, KV_HEADS * SIZE, dtype=torch.bfloat16).to("npu").unbind(0)
        self.keys, self.values = emulator.tag_kv(keys.clone()), emulator.tag_kv(values.clone())
        self.rest = dict(
            block_table=torch.tensor([[1, 2], [3, 4]], dtype=torch.int32).to("npu"),
            block_size=BLOCK,
            num_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            scale=0.25,
        )
        self.updates, self.told, self.done = torch.npu.Stream(), torch.npu.Event(), torch.npu.Event()
        self.graph = torch.npu.NPUGraph()

    def expected(self, bounds: list[int]) -> torch.Tensor:
        out, _ = self.operation(self.query * 2, self.keys, self.values, actual_seq_lengths_kv=bounds, **self.rest)
        return out.cpu()

    def capture(self, bounds: list[int]) -> None:
        self.result = torch.zeros_like(self.query)
        with torch.npu.graph(self.graph):
            self._record(bounds)

    def _record(self, bounds: list[int]) -> None:
        stream = torch.npu.current_stream()
        out = torch.empty_like(self.query)
        given = dict(query=self.query * 2, key=self.keys, value=self.values, **self.rest)
        workspace = self.get_workspace(**given, actual_seq_lengths_kv=bounds)
        sums = torch.empty(1, device="npu")
        torch.npu.graph_task_group_begin(stream)
        self.operation.out(**given, actual_seq_lengths_kv=bounds, workspace=workspace, out=[out, sums])
        self.handle = torch.npu.graph_task_group_end(stream)
        self.result.copy_(out)
        given["workspace"] = workspace
        self.kept = {k: self.place_of(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        self.kept["out"] = [self.place_of(out), self.place_of(sums)]

    def update(self, bounds: list[int]) -> None:
        with torch.npu.stream(self.updates):
            torch.npu.graph_task_update_begin(self.updates, self.handle)
            self.operation.out(**self.kept, actual_seq_lengths_kv=bounds)
            torch.npu.graph_task_update_end(self.updates)
        self.told.record(self.updates)

    def replay(self) -> None:
        torch.npu.current_stream().wait_event(self.told)
        self.graph.replay()
        self.done.record()


@pytest.fixture
def attention(torch_npu: Any) -> Attention:
    torch.manual_seed(0)
    attention = Attention(torch_npu)
    attention.capture([5, 6])
    return attention


def test_an_update_changes_what_the_next_replay_is_told(card: Any, attention: Attention) -> None:
    for bounds in ([5, 6], [200, 7], [1, 256]):
        attention.updates.wait_event(attention.done)
        attention.query.normal_()
        attention.update(bounds)
        assert card.counters.stray_ops  # of making the inputs
        attention.replay()
        assert torch.equal(attention.result.cpu(), attention.expected(bounds))


def test_what_is_held_is_in_the_same_place_and_serves_as_well(torch_npu: Any) -> None:
    attention = Attention(torch_npu)
    attention.place_of = lambda tensor: tensor
    attention.capture([5, 6])
    for bounds in ([200, 7], [1, 256]):
        attention.updates.wait_event(attention.done)
        attention.query.normal_()
        attention.update(bounds)
        attention.replay()
        assert torch.equal(attention.result.cpu(), attention.expected(bounds))
        assert torch.equal(attention.kept["query"].cpu(), (attention.query * 2).cpu())


def test_without_an_update_a_replay_is_told_what_it_was_told_last(attention: Attention) -> None:
    attention.replay()
    assert torch.equal(attention.result.cpu(), attention.expected([5, 6]))
    attention.update([30, 40])
    attention.replay()
    attention.query.normal_()
    attention.replay()
    assert torch.equal(attention.result.cpu(), attention.expected([30, 40]))


def test_an_update_computes_nothing_and_counts_nothing(card: Any, attention: Attention) -> None:
    before = attention.result.clone()
    card.next_step()
    attention.update([200, 200])
    counted = card.next_step()
    assert (counted.ops, counted.launches, counted.stray_ops, counted.graph_captures) == (0, 0, 0, 0)
    assert torch.equal(attention.result.cpu(), before.cpu())


def test_the_kv_read_follows_the_bounds(card: Any, attention: Attention) -> None:
    block_bytes = 2 * BLOCK * KV_HEADS * SIZE * 2
    for bounds, blocks in (([5, 6], 2), ([129, 6], 3), ([0, 128], 1)):
        attention.updates.wait_event(attention.done)
        attention.update(bounds)
        card.next_step()
        attention.replay()
        assert card.next_step().kv_bytes_read == blocks * block_bytes


def test_the_graph_keeps_its_memory_to_itself(card: Any, attention: Attention) -> None:
    """What updates name is known by its place: it is not kept, and no replay copies it."""
    gc.collect()
    in_use = card.in_use
    attention.kept.clear()
    gc.collect()
    assert card.in_use == in_use


@pytest.mark.parametrize(
    "wait",
    [
        lambda attention: attention.updates.wait_event(attention.done),
        lambda attention: attention.updates.wait_stream(torch.npu.current_stream()),
        lambda attention: attention.done.wait(attention.updates),
        lambda attention: attention.done.synchronize(),
        lambda attention: torch.npu.current_stream().synchronize(),
        lambda attention: torch.npu.synchronize(),
        lambda attention: attention.result.cpu(),
    ],
)
def test_an_update_comes_after_the_last_replay(attention: Attention, wait: Callable[[Attention], Any]) -> None:
    attention.update([5, 6])
    attention.replay()
    with pytest.raises(DeviceRefusal, match="did not wait for the last replay"):
        attention.update([7, 7])
    attention.result.to("cpu", non_blocking=True)  # nobody waits for it
    with pytest.raises(DeviceRefusal, match="did not wait for the last replay"):
        attention.update([7, 7])
    wait(attention)
    attention.update([7, 7])


def test_a_replay_comes_after_the_last_update(attention: Attention) -> None:
    other = torch.npu.Stream()
    before = torch.npu.Event()
    before.record(attention.updates)
    attention.update([7, 7])
    for wait in (lambda: None, lambda: other.wait_event(before)):
        wait()
        with torch.npu.stream(other), pytest.raises(DeviceRefusal, match="did not wait for the last update"):
            attention.graph.replay()
    other.wait_stream(attention.updates)
    with torch.npu.stream(other):
        attention.graph.replay()
    assert torch.equal(attention.result.cpu(), attention.expected([7, 7]))


def test_other_threads_may_wait_beside_an_update_and_a_capture(card: Any, attention: Attention) -> None:
    done = torch.npu.Event()
    done.record()

    def wait() -> float:
        done.synchronize()
        return torch.ones(2, device="npu").sum().item()

    card.next_step()
    with ThreadPoolExecutor(1) as threads, torch.npu.stream(attention.updates):
        torch.npu.graph_task_update_begin(attention.updates, attention.handle)
        assert threads.submit(wait).result() == 2
        attention.operation.out(**attention.kept, actual_seq_lengths_kv=[5, 6])
        torch.npu.graph_task_update_end(attention.updates)
        with torch.npu.graph(torch.npu.NPUGraph()):
            assert threads.submit(wait).result() == 2
            attention.query * 2
    counted = card.next_step()
    assert (counted.syncs, counted.host_reads) == (3, 2)  # one wait is the capture's own


def test_an_event_of_before_the_replay_says_nothing_about_it(attention: Attention) -> None:
    attention.done.record()
    attention.update([5, 6])
    torch.npu.current_stream().wait_stream(attention.updates)
    attention.graph.replay()
    attention.updates.wait_event(attention.done)
    with pytest.raises(DeviceRefusal, match="did not wait for the last replay"):
        attention.update([7, 7])


def test_an_update_is_what_the_group_was(card: Any, attention: Attention, torch_npu: Any) -> None:
    updates, handle = attention.updates, attention.handle
    told = dict(actual_seq_lengths_kv=[5, 6])
    with torch.npu.stream(updates):
        torch.npu.graph_task_update_begin(updates, handle)
        with pytest.raises(DeviceRefusal, match="the group has"):
            torch.npu.graph_task_update_end(updates)

        torch.npu.graph_task_update_begin(updates, handle)
        attention.operation.out(**attention.kept, **told)
        attention.operation.out(**attention.kept, **told)
        with pytest.raises(DeviceRefusal, match="the group has"):
            torch.npu.graph_task_update_end(updates)

        torch.npu.graph_task_update_begin(updates, handle)
        attention.result.add_(1)
        with pytest.raises(DeviceRefusal, match="the group has"):
            torch.npu.graph_task_update_end(updates)

        torch.npu.graph_task_update_begin(updates, handle)
        with pytest.raises(DeviceRefusal, match="makes new memory"):
            attention.operation(attention.query, attention.keys, attention.values, **attention.rest, **told)
        with pytest.raises(DeviceRefusal, match=r"during the update of a task group: .*reads a value"):
            attention.query.cpu()
        with pytest.raises(DeviceRefusal, match="257 where there is room for 256"):
            attention.operation.out(**attention.kept, actual_seq_lengths_kv=[257, 1])
        with pytest.raises(DeviceRefusal, match="during the update of a task group: a graph is replayed"):
            attention.graph.replay()
        with pytest.raises(DeviceRefusal, match="the group has"):
            torch.npu.graph_task_update_end(updates)
    attention.replay()
    assert torch.equal(attention.result.cpu(), attention.expected([5, 6]))


def test_updates_happen_on_the_current_stream_and_end(attention: Attention) -> None:
    with pytest.raises(DeviceRefusal, match="not the current one"):
        torch.npu.graph_task_update_begin(attention.updates, attention.handle)
    with pytest.raises(DeviceRefusal, match="without graph_task_update_begin"):
        torch.npu.graph_task_update_end(attention.updates)
    with pytest.raises(TypeError, match="takes what graph_task_group_end returned"):
        torch.npu.graph_task_update_begin(torch.npu.current_stream(), None)
    attention.graph.reset()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        attention.update([5, 6])


def test_groups_are_closed_and_hold_something(card: Any) -> None:
    x = torch.ones(3, device="npu")

    def capture(run: Callable[[Any], Any]) -> None:
        with torch.npu.graph(torch.npu.NPUGraph()):
            run(torch.npu.current_stream())

    def twice(stream: Any) -> None:
        torch.npu.graph_task_group_begin(stream)
        torch.npu.graph_task_group_begin(stream)

    def empty(stream: Any) -> None:
        torch.npu.graph_task_group_begin(stream)
        x.view(1, 3)
        torch.npu.graph_task_group_end(stream)

    def open_at_the_end(stream: Any) -> None:
        torch.npu.graph_task_group_begin(stream)
        x.add_(1)

    for run, why in (
        (twice, "not closed"),
        (empty, "no operations"),
        (open_at_the_end, "not closed"),
        (torch.npu.graph_task_group_end, "without graph_task_group_begin"),
        (lambda stream: torch.npu.graph_task_group_begin(torch.npu.Stream()), "not the one being captured"),
    ):
        with pytest.raises(DeviceRefusal, match=why):
            capture(run)
    for function in (torch.npu.graph_task_group_begin, torch.npu.graph_task_group_end):
        with pytest.raises(DeviceRefusal, match="outside of a capture"):
            function(torch.npu.current_stream())

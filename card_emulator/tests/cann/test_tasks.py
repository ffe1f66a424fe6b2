"""Task groups through torch_npu, as the backend uses them: fused attention that gets new lengths between runs."""

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

ROWS, QUERIES, HEADS, KV_HEADS, SIZE, BLOCK = 2, 3, 4, 2, 16, 128


class Attention:
    """A graph of one fused attention, and the updates of its lengths."""

    def __init__(self) -> None:
        import torch_npu

        torch.manual_seed(0)
        self.operation = torch_npu.npu_fused_infer_attention_score
        self.place_of = torch_npu._C._weak_ref_tensor
        self.get_workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace
        self.query = torch.randn(ROWS, QUERIES, HEADS, SIZE).npu()
        self.keys, self.values = (torch.randn(8, BLOCK, KV_HEADS * SIZE).npu() for _ in range(2))
        self.rest: dict[str, Any] = dict(
            block_table=torch.tensor([[1, 2], [3, 4]], dtype=torch.int32).npu(),
            block_size=BLOCK,
            num_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            input_layout="BSND",
            scale=0.25,
        )
        self.updates, self.told, self.done = torch.npu.Stream(), torch.npu.Event(), torch.npu.Event()
        self.result = torch.zeros_like(self.query)
        torch.npu.synchronize()
        self.graph = torch.npu.NPUGraph()
        with torch.npu.stream(torch.npu.Stream()):
            self.graph.capture_begin(capture_error_mode="thread_local")
            self._record([5, 6])
            self.graph.capture_end()

    def expected(self, lengths: list[int]) -> torch.Tensor:
        out, _ = self.operation(self.query * 2, self.keys, self.values, actual_seq_lengths_kv=lengths, **self.rest)
        return out.cpu()

    def _record(self, lengths: list[int]) -> None:
        stream = torch.npu.current_stream()
        out, sums = torch.empty_like(self.query), torch.empty(1, device="npu")
        given = dict(query=self.query * 2, key=self.keys, value=self.values, **self.rest)
        workspace = self.get_workspace(**given, actual_seq_lengths_kv=[2 * BLOCK] * ROWS)
        torch.npu.graph_task_group_begin(stream)
        self.operation.out(**given, actual_seq_lengths_kv=lengths, workspace=workspace, out=[out, sums])
        self.handle = torch.npu.graph_task_group_end(stream)
        self.result.copy_(out)
        given["workspace"] = workspace
        self.kept = {
            name: self.place_of(value) if isinstance(value, torch.Tensor) else value for name, value in given.items()
        }
        self.kept["out"] = [self.place_of(out), self.place_of(sums)]

    def update(self, lengths: list[int]) -> None:
        with torch.npu.stream(self.updates):
            torch.npu.graph_task_update_begin(self.updates, self.handle)
            self.operation.out(**self.kept, actual_seq_lengths_kv=lengths)
            torch.npu.graph_task_update_end(self.updates)
            self.told.record(self.updates)

    def replay(self) -> None:
        torch.npu.current_stream().wait_event(self.told)
        self.graph.replay()
        self.done.record()


@pytest.fixture
def attention(npu: Any) -> Attention:
    return Attention()


def test_an_update_changes_what_the_next_run_is_told(card: Any, attention: Attention) -> None:
    """And what it reads of keys and values, in blocks."""
    block_bytes = 2 * BLOCK * KV_HEADS * SIZE * 4
    for lengths, blocks in (([5, 6], 2), ([200, 7], 3), ([1, 256], 3)):
        attention.updates.wait_event(attention.done)
        attention.query.copy_(torch.randn(attention.query.shape))
        attention.update(lengths)
        torch.npu.synchronize()
        before = card.counts()
        attention.replay()
        torch.npu.synchronize()
        after = card.counts()
        assert after.kv_bytes_read - before.kv_bytes_read == blocks * block_bytes
        assert torch.equal(attention.result.cpu(), attention.expected(lengths))


def test_what_updates_name_is_not_kept(attention: Attention) -> None:
    """It is known by its place: the graph's memory can be shared."""
    gc.collect()
    in_use = torch.npu.memory_allocated()
    attention.kept.clear()
    gc.collect()
    assert torch.npu.memory_allocated() == in_use


def run(graph: Any) -> None:
    """torch_npu hands it to a thread of its own, and says later what became of it."""
    graph.replay()
    torch.npu.synchronize()


def test_a_run_comes_after_the_last_update(attention: Attention) -> None:
    attention.update([7, 7])
    with pytest.raises(RuntimeError, match="did not wait for the last update"):
        run(attention.graph)
    attention.replay()
    assert torch.equal(attention.result.cpu(), attention.expected([7, 7]))


def test_other_threads_may_wait_beside_an_update_and_a_capture(attention: Attention) -> None:
    done = torch.npu.Event()
    done.record()

    def wait() -> bool:
        done.synchronize()
        return done.query()

    with ThreadPoolExecutor(1) as threads, torch.npu.stream(attention.updates):
        torch.npu.graph_task_update_begin(attention.updates, attention.handle)
        assert threads.submit(wait).result()
        attention.operation.out(**attention.kept, actual_seq_lengths_kv=[5, 6])
        torch.npu.graph_task_update_end(attention.updates)
        graph = torch.npu.NPUGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            assert threads.submit(wait).result()
            attention.query * 2
        finally:
            graph.capture_end()

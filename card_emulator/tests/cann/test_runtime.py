"""Streams, events, memory and graphs of the emulated CANN, through torch_npu."""

from typing import Any

import torch
from cann_processes import run_python


def test_new_memory_is_full_of_nans(npu: Any) -> None:
    npu.empty_cache()
    assert torch.empty(16 << 20, device="npu")[:1000].cpu().isnan().all()


def test_a_missing_event_between_streams_is_a_wrong_result(npu: Any) -> None:
    source = torch.zeros(4, device="npu")
    npu.synchronize()
    side = npu.Stream()
    with npu.stream(side):
        source.fill_(7)
    assert source.cpu().tolist() == [0.0] * 4  # nobody waited for the side stream
    npu.current_stream().wait_stream(side)
    assert source.cpu().tolist() == [7.0] * 4


def test_a_pinned_buffer_that_is_used_again_too_early_is_a_wrong_result(npu: Any) -> None:
    host = torch.full((4,), 1.0).pin_memory()
    first = host.to("npu", non_blocking=True)
    host.fill_(2.0)
    assert first.cpu().tolist() == [2.0] * 4


def test_an_event_covers_what_came_before_it(npu: Any) -> None:
    value = torch.full((4,), 3.0, device="npu")
    host = torch.empty(4, pin_memory=True).fill_(-1)
    host.copy_(value, non_blocking=True)
    done = npu.Event()
    done.record()
    assert host.tolist() == [-1.0] * 4  # nothing runs before somebody waits
    done.synchronize()
    assert host.tolist() == [3.0] * 4


def graph_of(npu: Any, run: Any) -> Any:
    graph, stream = npu.NPUGraph(), npu.Stream()
    with npu.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    return graph


def test_a_captured_graph_computes_when_it_runs(npu: Any, card: Any) -> None:
    value, result = torch.ones(4, device="npu"), torch.zeros(4, device="npu")
    npu.synchronize()
    before = card.counts()
    graph = graph_of(npu, lambda: result.copy_(value * 2 + 1))
    assert result.cpu().tolist() == [0.0] * 4
    value.fill_(5)
    graph.replay()
    assert result.cpu().tolist() == [11.0] * 4
    after = card.counts()
    assert (after.captures - before.captures, after.replays - before.replays) == (1, 1)
    assert after.replayed - before.replayed >= 3
    newest, number = card.graphs[-1], len(card.graphs)
    assert (newest.ops, newest.replays, number) == (after.replayed - before.replayed, 1, after.captures)
    del graph
    assert len(card.graphs) == number


def test_copies_are_made_where_nothing_is_computed(npu: Any, card: Any) -> None:
    """As while memory is measured: whoever waits for a copy looks for it."""
    value = torch.full((4,), 3.0, device="npu")
    npu.synchronize()
    card.compile_only = True
    try:
        value.add_(1)
        found = value.cpu()
    finally:
        card.compile_only = False
    assert found.tolist() == [3.0] * 4


def test_an_operator_that_is_not_there_raises_its_name() -> None:
    """And the process ends as usual."""
    out = run_python(
        "import torch\n"
        "try:\n"
        "    torch.zeros(4, device='npu').erfinv_()\n"
        "    torch.npu.synchronize()\n"
        "except RuntimeError as error:\n"
        "    print('raised', 'Erfinv' in str(error))\n"
    )
    assert "raised True" in out, out


def test_a_workspace_that_is_too_small() -> None:
    out = run_python(
        "import torch\n"
        "import torch_npu\n"
        "query, keys = torch.zeros(1, 1, 2, 16, device='npu'), torch.zeros(4, 128, 32, device='npu')\n"
        "table = torch.zeros(1, 4, dtype=torch.int32).npu()\n"
        "try:\n"
        "    torch_npu.npu_fused_infer_attention_score.out(\n"
        "        query, keys, keys, block_table=table, actual_seq_lengths_kv=[5], input_layout='BSND',\n"
        "        block_size=128, num_heads=2, num_key_value_heads=2, scale=0.25,\n"
        "        workspace=torch.empty(16, dtype=torch.uint8, device='npu'),\n"
        "        out=[torch.empty_like(query), torch.empty(1, device='npu')])\n"
        "    torch.npu.synchronize()\n"
        "except RuntimeError as error:\n"
        "    print('raised', 'a workspace of 16 bytes where' in str(error))\n"
        "import os; os._exit(0)\n"
    )
    assert "raised True" in out, out

"""HCCL of the emulated CANN, through torch_npu's own process group: ranks as processes."""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import cann_processes
import pytest
import torch
import torch.multiprocessing as processes

LARGE = (1 << 19) + 3
"""float32 values: more than ranks show each other at a time."""


def ranks(run: Callable[..., Any], size: int, folder: Path, **environment: str) -> list[Any]:
    """What `run(rank, size)` returns in each rank."""
    processes.spawn(_rank, args=(run, size, str(folder), environment), nprocs=size)
    return [json.loads((folder / str(rank)).read_text()) for rank in range(size)]


def _rank(rank: int, run: Callable[..., Any], size: int, folder: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    cann_processes.install()

    torch.npu.set_device(rank)
    # By a file: it has no port that others may take, and does not end with rank 0.
    torch.distributed.init_process_group("hccl", rank=rank, world_size=size, init_method=f"file://{folder}/store")
    (Path(folder) / str(rank)).write_text(json.dumps(run(rank, size)))
    os._exit(0)  # without what torch_npu does at the end, which waits for a card that may have failed


def collectives(rank: int, size: int) -> dict[str, Any]:
    dist, device = torch.distributed, "npu"
    found: dict[str, Any] = {}
    free = torch.npu.mem_get_info()[0]
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        values = torch.arange(4, device=device).to(dtype) + rank
        dist.all_reduce(values)
        found[f"sum {dtype}"] = values.tolist()
    found["taken"] = free - torch.npu.mem_get_info()[0]
    most = torch.tensor([rank, -rank], dtype=torch.int32, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    found["most"] = most.tolist()
    gathered = torch.empty(2 * size, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(gathered, torch.tensor([rank, 10 * rank], device=device))
    found["gathered"] = gathered.tolist()
    sent = torch.full((3,), rank, device=device)
    dist.broadcast(sent, size - 1)
    found["sent"] = sent.tolist()
    part = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * size, device=device))
    found["part"] = part.tolist()
    large = torch.arange(LARGE, dtype=torch.int32, device=device)
    dist.all_reduce(large)
    found["large"] = torch.equal(large.cpu(), torch.arange(LARGE, dtype=torch.int32) * size)
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_collectives(size: int, tmp_path: Path) -> None:
    everybody = sum(range(size))
    for rank, found in enumerate(ranks(collectives, size, tmp_path)):
        sums = [size * value + everybody for value in range(4)]
        assert [found.pop(f"sum {dtype}") for dtype in (torch.float32, torch.bfloat16, torch.int32)] == [sums] * 3
        assert found == {
            "taken": pytest.approx(400e6, rel=0.02),  # HCCL's buffers, at a group's first collective
            "most": [size - 1, 0],
            "gathered": [value for of in range(size) for value in (of, 10 * of)],
            "sent": [size - 1] * 3,
            "part": [size * (2.0 * rank), size * (2.0 * rank + 1)],
            "large": True,
        }


def graph_of_a_sum() -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A graph, what it reads, and the sum over ranks of twice that."""
    values, sums = torch.zeros(2, device="npu"), torch.zeros(2, device="npu")
    torch.distributed.all_reduce(values)  # a group's first one makes its communicator, which no capture may
    graph, stream = torch.npu.NPUGraph(), torch.npu.Stream()
    torch.npu.synchronize()
    with torch.npu.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        doubled = values * 2
        torch.distributed.all_reduce(doubled)
        sums.copy_(doubled)
        graph.capture_end()
    return graph, values, sums


def in_a_graph(rank: int, size: int) -> list[list[float]]:
    """Sums by a graph that runs again, with a value of the host after each run."""
    graph, values, sums = graph_of_a_sum()
    found = []
    for step in range(3):
        values.fill_(rank + step)
        graph.replay()
        found.append(sums.tolist())
    return found


def test_npu_n06_a_collective_in_a_graph(tmp_path: Path) -> None:
    """Its stream is joined again, which the end of a capture refuses otherwise."""
    assert ranks(in_a_graph, 2, tmp_path) == [[[2.0 * (1 + 2 * step)] * 2 for step in range(3)]] * 2


def nobody_waits(rank: int, size: int) -> list[float]:
    """Rank 1 waits for the sum; rank 0 only for rank 1, on the host, before it looks at its own card. In a graph, whose
    collectives torch_npu's own thread does not ask for: it would make the card go on."""
    graph, values, sums = graph_of_a_sum()
    values.fill_(1)
    graph.replay()
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["rank 1 has it"], timedelta(seconds=40))
    found: list[float] = sums.tolist()
    if rank == 1:
        store.set("rank 1 has it", "yes")
    return found


def test_a_collective_begins_by_itself(tmp_path: Path) -> None:
    assert ranks(nobody_waits, 2, tmp_path) == [[4.0, 4.0]] * 2


def other_sizes(rank: int, size: int) -> str:
    values = torch.ones(2 + rank, device="npu")
    try:
        torch.distributed.all_reduce(values)
        values.tolist()
    except RuntimeError as error:
        return str(error)
    return "passed"


def test_npu_n01_ranks_that_disagree(tmp_path: Path) -> None:
    # A thread of torch_npu looks at collectives now and then, and ends the process if it is the first to see one fail.
    for found in ranks(other_sizes, 2, tmp_path, TORCH_HCCL_ASYNC_ERROR_HANDLING="0"):
        assert "HcclAllReduce of 2 Float" in found
        assert "HcclAllReduce of 3 Float" in found

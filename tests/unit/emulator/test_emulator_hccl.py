"""Collectives of the emulated Gaudi, over gloo."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import card_emulator
from card_emulator.testing import graph

# Before there is a group: `torch.distributed.nn.functional`, which vLLM imports, has the group of that moment as a
# default argument. A group that outlives its process's main thread may abort the process.
from vllm_gaudi_spec.devices.hpu.communicator import HpuCommunicator


def work(rank: int, world: int, path: str) -> None:
    torch.set_num_threads(1)
    card_emulator.install()
    card = card_emulator.device()
    dist.init_process_group("hccl", rank=rank, world_size=world, init_method=f"file://{path}")
    try:
        with torch.inference_mode():
            what_a_gaudi_refuses(card, world)
            through_our_communicator(rank, world)
            collectives(rank, world)
            inside_an_hpu_graph(card, world)
    finally:
        dist.destroy_process_group()
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in threads if "gloo" in name], "the process would end beside threads of a group"


def collectives(rank: int, world: int) -> None:
    x = torch.full((world,), float(rank + 1)).to("hpu")
    every = [float(other + 1) for other in range(world)]
    total = x.clone()
    dist.all_reduce(total)
    assert total.tolist() == [sum(every)] * world
    flat = torch.empty(world * world, device="hpu")
    dist.all_gather_into_tensor(flat, x)
    assert flat.view(world, world)[:, 0].tolist() == every
    parts = [torch.empty(world, device="hpu") for _ in range(world)]
    dist.all_gather(parts, x)
    assert [part[0].item() for part in parts] == every
    own = torch.empty(1, device="hpu")
    dist.reduce_scatter_tensor(own, x)
    assert own.item() == sum(every)
    sent = x.clone()
    dist.broadcast(sent, 0)
    assert sent[0].item() == 1.0
    dist.barrier()
    if world > 1:
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            got = torch.zeros(world, device="hpu")
            dist.recv(got, 0)
            assert got[0].item() == 1.0


def twice_the_sum(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    dist.all_reduce(y)
    return y * 2


def what_a_gaudi_refuses(card: Any, world: int) -> None:
    # N01: in a capture, the first collective of a group.
    card.lazy_collectives = True
    run = graph(twice_the_sum)
    with pytest.raises(RuntimeError, match="creates a communicator during a capture"):
        run(torch.zeros(2, device="hpu"))
    card.blocked, card.lazy_collectives = None, False
    # N04: integers are added as float32.
    large = torch.tensor([2**24 + 1, 3], dtype=torch.int32).to("hpu")
    dist.all_reduce(large)
    assert large.tolist() == [2**24 * world, 3 * world]
    # N05: bytes move by twos.
    flags = torch.zeros(3, dtype=torch.bool, device="hpu")
    with pytest.raises(RuntimeError, match="count is not even"):
        dist.broadcast(flags, 0)
    card.hostile = False
    dist.broadcast(flags, 0)
    large = torch.tensor([2**24 + 1, 3], dtype=torch.int32).to("hpu")
    dist.all_reduce(large)
    assert large.tolist() == [(2**24 + 1) * world, 3 * world]
    card.hostile = True


def through_our_communicator(rank: int, world: int) -> None:
    card = card_emulator.device()
    everybody = dist.group.WORLD
    assert everybody is not None
    ours = HpuCommunicator(cpu_group=everybody, device=torch.device("hpu", rank), device_group=everybody)
    x = torch.full((2, 3), float(rank)).to("hpu")
    before = card.counters.implicit_markers
    gathered = ours.all_gather(x + 0, dim=0)  # N03: rank after rank
    assert ours.all_reduce(x + 1).tolist() == [[world * (world + 1) / 2] * 3] * 2
    assert card.counters.implicit_markers == before, "N02: the pending graph ends before a collective does it"
    assert gathered[:, 0].tolist() == [float(other) for other in range(world) for _ in range(2)]


def inside_an_hpu_graph(card: Any, world: int) -> None:
    x = torch.zeros(1, device="hpu")
    run = graph(twice_the_sum)
    with pytest.raises(RuntimeError, match="LAZY_COLLECTIVES"):
        run(x)
    card.blocked = None
    card.lazy_collectives = True
    assert [run(x).item(), run(x + 1).item()] == [2.0 * world, 4.0 * world]
    run.clear_cache()  # a captured collective keeps its process group, whose threads must end before the process
    before = card.counters.implicit_markers
    x + 1
    dist.all_reduce(x.clone())
    assert card.counters.implicit_markers == before + 1


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_l11_n01_n02_n03_n04_n05_n07_collectives_of_gaudis(tmp_path: Path, world: int) -> None:
    mp.spawn(work, (world, str(tmp_path / "store")), nprocs=world)

"""Collectives between CPU ranks return the same bits on each rank, on which ranks rely to decide alike."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm_gaudi_spec import environment
from vllm_gaudi_spec.device_table import load_backend
from vllm_gaudi_spec.devices.cpu.communicator import CpuSpecCommunicator

SIZE = 1000


def work(rank: int, world: int, folder: str, shared: bool, results: Any) -> None:
    torch.set_num_threads(1)
    store = Path(folder) / "store"
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{store}")
    environment.name_process_group(f"file://{folder}/{os.getppid()}")
    if not shared:
        os.environ["VLLM_DIST_IDENT"] += f"-machine-{rank}"
    ranks = CpuSpecCommunicator(dist.group.WORLD, device_group=dist.group.WORLD, unique_name="tp:0")
    torch.manual_seed(rank)
    mine = torch.randn(SIZE) * 10.0 ** torch.randint(-3, 4, (SIZE,))
    gathered = ranks.all_gather(mine, dim=0)
    states = ranks.broadcast(ranks.all_reduce(mine.clone()))
    # vLLM lets data-parallel ranks use gloo, with several tensors of different dtypes at once.
    tokens, experts = torch.full((2, 3), float(rank)), torch.full((2, 1), rank, dtype=torch.int32)
    engines = CpuSpecCommunicator(dist.group.WORLD, device_group=dist.group.WORLD, unique_name="dp:0")
    each = engines.all_gatherv([tokens, experts], dim=0, sizes=[2] * world)
    own = engines.reduce_scatterv(each[0] * 10**rank, dim=0, sizes=[2] * world)
    results_of_rank = [gathered, states, *each, own]
    results.put((rank, ranks.supports_tensor_dict, [part.numpy().tobytes() for part in results_of_rank], own.tolist()))
    dist.barrier()
    os._exit(0)  # skip the destruction of torch's groups, which wait for each other


@pytest.mark.parametrize(("world", "shared"), [(2, True), (3, True), (3, False)])
def test_every_rank_has_the_same_bits(world: int, shared: bool, tmp_path: Path) -> None:
    """Over shared memory, if vLLM's build for this CPU has it, and over gloo, as between machines."""
    fork = multiprocessing.get_context("fork")
    load_backend("cpu")  # loads vLLM's kernels
    shared = shared and hasattr(torch.ops._C, "init_shm_manager")
    results = fork.SimpleQueue()
    workers = [fork.Process(target=work, args=(rank, world, str(tmp_path), shared, results)) for rank in range(world)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
        assert worker.exitcode == 0
    answers = sorted(results.get() for _ in workers)
    assert [rank for rank, *_ in answers] == list(range(world))
    assert {over_memory for _, over_memory, *_ in answers} == {shared}
    for _, _, parts, _ in answers[1:]:
        assert parts[:4] == answers[0][2][:4]
    for rank, *_, own in answers:
        assert own == [[rank * sum(10.0**other for other in range(world))] * 3] * 2


def test_ranks_on_other_machines_use_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DIST_IDENT", "")
    environment.name_process_group("tcp://127.0.0.1:4711")
    here = os.environ["VLLM_DIST_IDENT"]
    assert here.startswith("4711-")
    environment.name_process_group("tcp://127.0.0.1:4711")
    assert os.environ["VLLM_DIST_IDENT"] == here
    monkeypatch.setattr(environment, "_identify_shared_memory", lambda: "another machine")
    environment.name_process_group("tcp://127.0.0.1:4711")
    assert os.environ["VLLM_DIST_IDENT"] != here

"""Checks of copies between host and device, including copies during other work, and of the reported free memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_gaudi_spec.config import format_size
from vllm_gaudi_spec.self_test.subject import Failed, NotChecked, Subject, random

_DOWNLOADS = 10_000
_MIN_DOWNLOADS = 50
"""The number of copies to the host that are checked even if the device is slow."""
_IN_FLIGHT = 8
_NUMBERS = 64
_SIZE = 128 << 20
"""The size of an allocation in bytes."""
# The accepted range of the change in free memory, relative to the allocation. Allocators round sizes up, and other work
# on the device slightly changes the free memory.
_LEAST, _MOST = 0.5, 2.0
# The number of allocations to try. The first ones may reuse memory that torch has cached, for example in an earlier
# self-test.
_ATTEMPTS = 4


class _Started(NamedTuple):
    step: int
    wait: Callable[[], torch.Tensor]


def check_downloads(subject: Subject) -> str:
    """Check copies of a counter to the host, while a graph overwrites the counter in each step."""
    memory, graphs = subject.backend.memory, subject.backend.graphs
    count = graphs.graph(self_test_count)
    counter = memory.upload(torch.zeros(_NUMBERS, dtype=torch.int32))
    waiting: deque[_Started] = deque()
    num_done = num_wrong = 0
    first_wrong = ""

    def arrive() -> None:
        nonlocal num_done, num_wrong, first_wrong
        step, wait = waiting.popleft()
        found = wait().unique().tolist()
        num_done += 1
        if found != [step]:
            num_wrong += 1
            first_wrong = first_wrong or f"{', '.join(map(str, found[:3]))} at step {step}"

    for step in range(1, _DOWNLOADS + 1):
        counter = count(counter)
        waiting.append(_Started(step, memory.start_download(counter)))
        graphs.step_done()
        if len(waiting) == _IN_FLIGHT:
            arrive()
        if subject.is_time_up and step >= _MIN_DOWNLOADS:
            break
    while waiting:
        arrive()
    if num_wrong:
        raise Failed(f"{num_wrong:,} of {num_done:,} downloads returned another step's values, the first {first_wrong}")
    return f"{num_done:,} downloads, {_IN_FLIGHT} at a time"


def self_test_count(counter: torch.Tensor) -> torch.Tensor:
    return counter + 1


def check_copies(subject: Subject) -> str:
    """Check that tensors of each dtype do not change when they are copied to the device and back."""
    int32, float32 = torch.iinfo(torch.int32), torch.finfo(torch.float32)
    hosts = {
        "int32": torch.tensor([int32.min, int32.min + 1, -1, 0, 1, 255, 256, int32.max - 1, int32.max]).int(),
        "int64": torch.tensor([int32.min, -1, 0, 1, int32.max]),
        "bool": torch.tensor([True, False, False, True, True]),
        "float32": torch.tensor([float32.min, -1.0, 0.0, float32.tiny, 1 / 3, float32.max, torch.inf, -torch.inf]),
        "bfloat16": torch.cat((random((1000,), 5), torch.tensor([1 / 3, 3e38]))).to(torch.bfloat16),
        str(subject.dtype).removeprefix("torch."): random((7, 129), 6, subject.dtype),
    }
    for name, host in hosts.items():
        back = subject.backend.memory.download(subject.backend.memory.upload(host.clone()))
        if (back.dtype, back.shape) != (host.dtype, host.shape):
            raise Failed(f"{name} came back as {back.dtype} {tuple(back.shape)}")
        wrong = (back != host).flatten().nonzero().flatten()
        if len(wrong):
            first = int(wrong[0])
            raise Failed(
                f"{len(wrong)} of {host.numel()} numbers of {name} changed, the first to "
                f"{back.flatten()[first].item()} instead of {host.flatten()[first].item()}"
            )
    return ", ".join(hosts)


def check_memory(subject: Subject) -> str:
    """Check that an allocation reduces the reported free memory by the size of the allocation."""
    backend = subject.backend
    before = backend.memory.free_bytes()
    if before is None:
        raise NotChecked("the device does not report its free memory")
    if before < 2 * _SIZE:
        raise Failed(f"{format_size(before)} are reported as free before anything was loaded")
    held = []
    for _ in range(_ATTEMPTS):
        free = backend.memory.free_bytes() or 0
        held.append(torch.zeros(_SIZE, dtype=torch.uint8, device=backend.traits.torch_device))
        backend.graphs.step_done()
        backend.memory.synchronize()
        taken = free - (backend.memory.free_bytes() or 0)
        if _LEAST * _SIZE <= taken <= _MOST * _SIZE:
            return f"{format_size(before)} free"
    raise Failed(f"free memory fell by {format_size(taken)} when {format_size(_SIZE)} were taken")

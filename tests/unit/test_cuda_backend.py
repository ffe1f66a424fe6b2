"""The GPU backend itself: captures, uploads and downloads that wait for nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.cuda


@pytest.fixture
def backend() -> Iterator[Any]:
    from vllm_gaudi_spec.backends.cuda import Backend

    with torch.inference_mode():
        yield Backend()


def test_a_late_capture_applies_a_step_once(backend: Any) -> None:
    state = torch.zeros(4, device="cuda")

    def step(by: torch.Tensor) -> torch.Tensor:
        state.add_(by)
        return state @ state

    run = backend.graph(step)
    backend.warmed_up()
    seen = [float(run(backend.upload(torch.full((4,), float(i))))) for i in (1, 2, 3)]
    assert seen == [4, 36, 144]
    assert backend.counts()["compiled_after_warmup"] == 1
    assert backend.counts()["captured"] == {step.__qualname__: 1}


def test_programs_do_not_spoil_each_others_results(backend: Any) -> None:
    """The memory that they compute in is shared: a small one recorded later may get what a large one computed in."""

    def large(x: torch.Tensor) -> torch.Tensor:
        return ((x.repeat(1000, 1) * 3).cumsum(0) + 1).sum()

    def small(x: torch.Tensor) -> torch.Tensor:
        return (x.repeat(500, 1) - 1) * 2

    run_large, run_small = backend.graph(large), backend.graph(small)
    x = torch.randn(64, device="cuda")
    for _ in range(3):
        run_large(x)
        result = run_small(x)
        run_large(x)
        assert torch.equal(result, small(x))


def test_another_engine_captures_when_the_first_is_gone(backend: Any) -> None:
    x = torch.ones(3, device="cuda")
    for _ in range(2):
        run = backend.graph(torch.neg)
        for _ in range(2):
            assert run(x).tolist() == [-1, -1, -1]
        del run
        gc.collect()


def test_uploads_and_downloads(backend: Any) -> None:
    read = backend.num_host_reads
    torch.cuda.set_sync_debug_mode("error")
    try:
        for dtype in (torch.int32, torch.int64, torch.float32):
            host = torch.arange(1000).to(dtype)
            there = backend.upload(host)
            host.fill_(0)
            waits = backend.start_download(there)
            there.fill_(0)
            assert torch.equal(waits(), torch.arange(1000).to(dtype))
            assert torch.equal(backend.download(there), torch.zeros(1000, dtype=dtype))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert backend.num_host_reads - read == 6


def test_blocks_are_copied(backend: Any) -> None:
    from vllm_gaudi_spec.backends.kv_pair import KVPair

    keys, values = torch.randn(2, 6 * 16, 2, 8, device="cuda")
    expected = [tensor.unflatten(0, (6, 16)).clone() for tensor in (keys, values)]
    copy = backend.block_copier({"a": KVPair(keys, values, 16)})
    copy([(0, 0)])
    copy([(1, 4), (2, 5)])
    for tensor, before in zip((keys, values), expected, strict=True):
        before[4], before[5] = before[1], before[2]
        assert torch.equal(tensor.unflatten(0, (6, 16)), before)

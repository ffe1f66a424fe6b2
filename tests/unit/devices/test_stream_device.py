"""What a capture of a stream does besides, and how the GPU is chosen."""

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from vllm_gaudi_spec import device_table
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.common.stream_device import Captures


def test_garbage_collector_is_paused_during_capture() -> None:
    runtime = SimpleNamespace(
        graph_pool_handle=object,
        Stream=object,
        stream=nullcontext,
        memory_reserved=lambda: 0,
        memory_allocated=lambda: 0,
        mem_get_info=lambda: (1, 1),
    )
    seen: list[bool] = []

    def graph() -> SimpleNamespace:
        return SimpleNamespace(capture_begin=lambda **_: None, capture_end=lambda: None)

    Captures(runtime, graph, torch.device("cpu")).record(lambda: seen.append(gc.isenabled()))
    assert seen == [False]
    assert gc.isenabled()


def test_cuda_is_never_chosen_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VGS_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_table.choose_device() != "cuda"


def test_refusal_without_a_gpu_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_gaudi_spec.devices.cuda.backend import make_backend

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedConfigError, match="needs an NVIDIA GPU"):
        make_backend()


def test_more_gpus_than_present_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_gaudi_spec.devices.cuda.platform import CudaSpecPlatform

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    two = SimpleNamespace(parallel_config=SimpleNamespace(local_world_size=2, data_parallel_size=1))
    with pytest.raises(
        UnsupportedConfigError, match="Only 1 of 2 requested GPUs were found; set --tensor-parallel-size to 1"
    ):
        CudaSpecPlatform.check_and_update_config(two)

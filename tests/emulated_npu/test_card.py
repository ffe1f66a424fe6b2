"""Tensors of the emulated NPU, and what using them costs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from vllm_gaudi_spec import emulator
from vllm_gaudi_spec.emulator import report
from vllm_gaudi_spec.emulator.card import DeviceRefusal

THIS_FILE = os.path.basename(__file__)


def test_tensors_are_on_npu_and_compute_as_on_the_host(card: Any) -> None:
    x = torch.arange(6.0, device="npu").view(2, 3)
    assert x.device == torch.device("npu:0")
    torch.testing.assert_close((x @ x.T).cpu(), torch.arange(6.0).view(2, 3) @ torch.arange(6.0).view(2, 3).T)
    assert torch.tensor([3], device="npu").item() == 3
    assert torch.nn.Linear(2, 2).to("npu").weight.device == x.device
    with torch.device("npu"):
        assert torch.ones(2).device == torch.empty(2).device == torch.tensor([1]).device == x.device


def test_int64_is_whole(card: Any) -> None:
    big = torch.tensor([2**40], device="npu")
    assert (big + 1).item() == 2**40 + 1


def test_an_operation_outside_graphs_is_a_launch_and_no_compile(card: Any) -> None:
    x = torch.ones(3).to("npu")
    card.next_step()
    y = (x + 1) * 2
    y = y.view(3, 1)
    counted = card.next_step()
    assert (counted.launches, counted.stray_ops, counted.compiles) == (2, 2, 0)
    (torch.ones(5).to("npu") + 1).sum()
    assert card.next_step().compiles == 0


def test_reads_are_counted_with_their_line(card: Any) -> None:
    x = torch.ones(3).to("npu")
    bool(x.sum() > 1)
    assert card.counters.host_reads == 1
    assert THIS_FILE in card.counters.lines("device-to-host sync")[0]


def test_float64_runs_on_the_host(card: Any) -> None:
    third = torch.ones(1, dtype=torch.float64).to("npu") / 3
    assert card.counters.float64_ops
    assert card.counters.fallbacks
    assert third.item() == 1 / 3  # in full precision


def test_operations_without_a_kernel_are_fallbacks(card: Any) -> None:
    x = torch.ones(3).to("npu")
    torch.lgamma(x)
    assert card.counters.fallbacks == 1
    card.allow_fallbacks = False
    with pytest.raises(DeviceRefusal, match=r"aten.copysign.* has no kernel"):
        torch.copysign(x, x)
    torch.cumsum(x, 0)


def test_pinned_memory(card: Any) -> None:
    host = torch.ones(4)
    pinned = host.pin_memory()
    assert pinned.is_pinned()
    assert not host.is_pinned()
    assert pinned[1:].is_pinned()
    assert pinned.pin_memory() is pinned
    for made in (
        torch.empty(2, pin_memory=True),
        torch.zeros((2, 3), dtype=torch.int32, pin_memory=True),
        torch.tensor([1, 2], pin_memory=True),
    ):
        assert made.is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        host.to("npu").pin_memory()


def test_memory(card: Any) -> None:
    free, total = torch.npu.mem_get_info()
    x = torch.zeros(1 << 20, device="npu")
    assert torch.npu.mem_get_info() == (free - (4 << 20), total)
    assert torch.npu.memory_allocated() == torch.npu.memory_reserved() == total - free + (4 << 20)
    assert torch.accelerator.get_memory_info() == torch.npu.mem_get_info()
    peak = torch.npu.max_memory_allocated()
    del x
    assert torch.npu.mem_get_info()[0] == free
    assert torch.npu.max_memory_allocated() == peak
    torch.npu.reset_peak_memory_stats()
    assert torch.npu.max_memory_allocated() < peak
    card.compile_only = True  # or the host would have to have as much
    with pytest.raises(torch.OutOfMemoryError, match="Ascend910B3"):
        torch.empty(2 * total, dtype=torch.int8, device="npu")


def test_a_process_uses_one_of_the_devices(card: Any) -> None:
    torch.npu.set_device("npu:0")
    torch.npu.set_device(0)
    torch.npu.set_device("npu")
    torch.ones(1, device="npu")
    with pytest.raises(RuntimeError, match="one device"):
        torch.npu.set_device(1)
    with pytest.raises(RuntimeError, match="one device"):
        torch.ones(1, device="npu:1")
    assert torch.npu.device_count() == torch.accelerator.device_count() == 8
    assert torch.npu.get_device_name().startswith("Ascend910B")
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.current_stream() is torch.npu.current_stream()
    for function in (torch.accelerator.synchronize, torch.accelerator.empty_cache, torch.accelerator.empty_host_cache):
        function()


def test_what_is_not_emulated_is_not_there(torch_npu: Any) -> None:
    for owner, name in ((torch_npu, "npu_moe_init_routing_v2"), (torch.npu, "memory_stats"), (torch.npu, "HPUGraph")):
        with pytest.raises(AttributeError):
            getattr(owner, name)
    with pytest.raises(NotImplementedError):
        torch_npu.npu_fusion_attention()


def test_a_process_has_one_card(card: Any) -> None:
    emulator.install_npu()
    with pytest.raises(RuntimeError, match="this process already has a Ascend910B3"):
        emulator.install()


def test_the_report_has_no_times(card: Any) -> None:
    torch.ones(3).to("npu").sum().item()
    card.next_step()
    assert report.as_json(card)["device"] == "Ascend910B3"
    assert report.as_json(card)["estimate"] is None
    assert "estimate" not in report.as_table(card)

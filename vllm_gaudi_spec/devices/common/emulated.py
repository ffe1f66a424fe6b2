"""Mixins for devices on which an emulator replaces the real card and counts operations.

In a list of base classes, each mixin must precede the device's own class.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import card_emulator
from card_emulator import report, source
from vllm_gaudi_spec import environment
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.base import Graphs, Memory, Weights
from vllm_gaudi_spec.devices.common import host_memory

if TYPE_CHECKING:
    from torch import nn

    from vllm_gaudi_spec.upstream.kv_cache import KVCacheConfig, KVCacheLayout


_DEVICES = Path(__file__).parents[1]
source.look_past(observers=(str(_DEVICES / "hpu" / "captured.py"),), backends=(f"{_DEVICES}{os.sep}",))


def install_npu() -> None:
    """Install the emulated CANN in this process, for use by Huawei's torch_npu."""
    environment.set_torch_npu_defaults()
    folder = environment.torch_npu_folder()
    try:
        card_emulator.install_npu(folder, environment.cache_folder())
    except card_emulator.SetupError as error:
        raise UnsupportedConfigError(
            f"{error} The folder {folder} was searched for torch_npu; set {environment.TORCH_NPU.name} to use another."
        ) from error


class EmulatedGraphs(Graphs):
    def warmed_up(self) -> None:
        super().warmed_up()
        card_emulator.counted().next_step()
        card_emulator.counted().seal()

    def step_done(self) -> None:
        super().step_done()
        card_emulator.counted().next_step()

    def counts(self) -> dict[str, Any]:
        return super().counts() | {"emulator": report.as_json(card_emulator.counted())}


class EmulatedMemory(Memory):
    def allocate_kv(self, kv_cache_config: KVCacheConfig, layout: KVCacheLayout) -> dict[str, Any]:
        by_layer: dict[str, Any] = super().allocate_kv(kv_cache_config, layout)
        for pair in by_layer.values():
            for tensor in pair.tensors():
                card_emulator.tag_kv(tensor)
        return by_layer

    def measure_peak(self, run: Callable[[], object]) -> int:
        """Measure without computing values. The values do not affect memory use, and computing them would take
        minutes."""
        device = card_emulator.counted()
        device.compile_only = True
        try:
            return super().measure_peak(run)
        finally:
            device.compile_only = False

    def available_memory(self, utilization: float, num_ranks: int) -> int:
        # The emulated card reports more memory than the host has.
        return min(
            super().available_memory(utilization, num_ranks), host_memory.choose_kv_bytes(utilization) // num_ranks
        )


class EmulatedWeights(Weights):
    def prepare_model(self, model: nn.Module) -> None:
        card_emulator.counted().sealed = False  # an earlier engine in this process may have ended its warm-up
        super().prepare_model(model)

"""What is added to a device's own objects where the emulator plays its card: it only looks at it.

Each class stands before the device's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec import emulator
from vllm_gaudi_spec.devices.base import Graphs, Memory, Weights
from vllm_gaudi_spec.devices.common import host_memory
from vllm_gaudi_spec.emulator import report

if TYPE_CHECKING:
    from torch import nn
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheLayout


class EmulatedGraphs(Graphs):
    def warmed_up(self) -> None:
        super().warmed_up()
        emulator.counted().next_step()
        emulator.counted().seal()

    @contextmanager
    def warming_up_later(self) -> Iterator[None]:
        device = emulator.counted()
        device.sealed = False
        with super().warming_up_later():
            yield
        device.next_step()
        device.seal()

    def step_done(self) -> None:
        super().step_done()
        emulator.counted().next_step()

    def counts(self) -> dict[str, Any]:
        return super().counts() | {"emulator": report.as_json(emulator.counted())}


class EmulatedMemory(Memory):
    def allocate_kv(self, kv_cache_config: KVCacheConfig, layout: KVCacheLayout) -> dict[str, Any]:
        by_layer: dict[str, Any] = super().allocate_kv(kv_cache_config, layout)
        for pair in by_layer.values():
            for tensor in pair.tensors():
                emulator.tag_kv(tensor)
        return by_layer

    def peak_of(self, run: Callable[[], object]) -> int:
        """Sizes are known without values, and the host would take minutes to compute these."""
        device = emulator.counted()
        device.compile_only = True
        try:
            return super().peak_of(run)
        finally:
            device.compile_only = False

    def available_memory(self, utilization: float, num_ranks: int) -> int:
        # A card has more than the host that plays it.
        return min(super().available_memory(utilization, num_ranks), host_memory.for_kv(utilization) // num_ranks)


class EmulatedWeights(Weights):
    def prepare_model(self, model: nn.Module) -> None:
        emulator.counted().sealed = False  # another engine of this process warms up as well
        super().prepare_model(model)

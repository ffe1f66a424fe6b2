"""What is added to a device's own backend where the emulator plays its card: it only looks at it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec import emulator
from vllm_gaudi_spec.devices.common import host_memory

if TYPE_CHECKING:
    from torch import nn
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheLayout

_Device: Any = object


class OnEmulatedCard(_Device):
    """Stands before a device's backend."""

    def prepare_model(self, model: nn.Module) -> None:
        emulator.device().sealed = False  # another engine of this process warms up anew
        super().prepare_model(model)

    def allocate_kv(self, kv_cache_config: KVCacheConfig, layout: KVCacheLayout) -> dict[str, Any]:
        by_layer: dict[str, Any] = super().allocate_kv(kv_cache_config, layout)
        for pair in by_layer.values():
            for tensor in pair.tensors():
                emulator.tag_kv(tensor)
        return by_layer

    def available_memory(self, utilization: float, num_ranks: int) -> int:
        # A card has more than the host that plays it.
        return min(super().available_memory(utilization, num_ranks), host_memory.for_kv(utilization) // num_ranks)

    def warmed_up(self) -> None:
        super().warmed_up()
        emulator.device().next_step()
        emulator.device().seal()

    def step_done(self) -> None:
        super().step_done()
        emulator.device().next_step()

    def counts(self) -> dict[str, Any]:
        counted: dict[str, Any] = super().counts()
        return counted | {"emulator": emulator.device().report()}

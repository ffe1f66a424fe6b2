"""The Gaudi backend, unchanged, on the emulated card; what is added here only looks at it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec import emulator
from vllm_gaudi_spec.config import (
    UnsupportedConfigError,
    emulated_generation,
    gaudi_has_lazy_collectives,
    gaudi_is_lazy,
)

if not gaudi_is_lazy():
    raise UnsupportedConfigError(
        "hpu-emulated shows lazy mode only; set PT_HPU_LAZY_MODE=1, or VGS_DEVICE=hpu on a Gaudi."
    )
# Before the import: the emulator puts a `habana_frameworks` in place.
emulator.install(generation=emulated_generation(), lazy=True)
emulator.device().lazy_collectives = gaudi_has_lazy_collectives()

from vllm_gaudi_spec.backends import host_memory, hpu  # noqa: E402
from vllm_gaudi_spec.backends.hpu_fp8 import GaudiArithmetic  # noqa: E402
from vllm_gaudi_spec.quantization import simulation  # noqa: E402

if TYPE_CHECKING:
    from torch import nn
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheLayout

    from vllm_gaudi_spec.quantization.config import QuantConfig
    from vllm_gaudi_spec.quantization.place import Measuring, Place


class Backend(hpu.Backend):
    name = "hpu-emulated"

    @property
    def fp8_range(self) -> str | None:
        return emulated_generation()

    def loading(self, given: QuantConfig) -> AbstractContextManager[None]:
        return nullcontext()

    def quantize(self, model: nn.Module, given: QuantConfig, place: Place) -> Measuring | None:
        # What Intel Neural Compressor does on the card needs the card.
        return simulation.apply(model, given, place, GaudiArithmetic)

    def prepare_model(self, model: nn.Module) -> None:
        emulator.device().sealed = False  # another engine of this process warms up anew
        super().prepare_model(model)

    def allocate_kv(self, kv_cache_config: KVCacheConfig, layout: KVCacheLayout) -> dict[str, Any]:
        by_layer = super().allocate_kv(kv_cache_config, layout)
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
        return super().counts() | {"emulator": emulator.device().report()}

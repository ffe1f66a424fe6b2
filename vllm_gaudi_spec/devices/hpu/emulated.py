"""The Gaudi backend on an emulated card. It differs from the real backend only in FP8 quantization."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import card_emulator
from card_emulator.gaudi.ownership import acquire
from vllm_gaudi_spec.environment import (
    cache_folder,
    cached_files,
    emulated_generation,
    emulated_modules,
    emulator_is_hostile,
    gaudi_has_lazy_collectives,
    gaudi_is_lazy,
)

# This call must precede the backend's import, because the emulator provides `habana_frameworks`. If torch has loaded
# the card automatically, as with Habana's bridge, the card already has a mode, which `open_bridge` checks.
_card = card_emulator.device()
card_emulator.install(generation=emulated_generation(), lazy=_card.lazy if _card.installed else gaudi_is_lazy())
_card.lazy_collectives = gaudi_has_lazy_collectives()
_card.hostile = emulator_is_hostile()
if modules := emulated_modules():
    _card.acquire = partial(acquire, cached_files.make_folder(cache_folder()) / "emulated_gaudis", modules)

from vllm_gaudi_spec.devices.common.emulated import EmulatedGraphs, EmulatedMemory, EmulatedWeights  # noqa: E402
from vllm_gaudi_spec.devices.hpu import backend as hpu  # noqa: E402
from vllm_gaudi_spec.devices.hpu.bridge import open_bridge  # noqa: E402
from vllm_gaudi_spec.devices.hpu.fp8 import GaudiArithmetic  # noqa: E402
from vllm_gaudi_spec.quantization import simulation  # noqa: E402

if TYPE_CHECKING:
    from torch import nn

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.quantization.config import LoadContext, Measuring, QuantConfig


def make_backend() -> DeviceBackend:
    bridge = open_bridge()
    if bridge.regions is not None:
        bridge.regions.traces_twice = emulator_is_hostile()
    graphs = _Graphs(bridge)
    traits = replace(hpu.TRAITS, name="hpu-emulated", simulates_quantization=True)
    return hpu.assemble(bridge, traits, graphs, _Memory(bridge, graphs), _Weights(bridge))


class _Graphs(EmulatedGraphs, hpu.HpuGraphs):
    def num_recipes(self) -> int:
        # The emulated bridge's metric counts graphs instead of recipes.
        return len(card_emulator.device().graph_recipes)


class _Memory(EmulatedMemory, hpu.HpuMemory):
    pass


class _Weights(EmulatedWeights, hpu.HpuWeights):
    @property
    def fp8_range(self) -> str | None:
        return emulated_generation()

    def loading(self, quant_config: QuantConfig) -> AbstractContextManager[None]:
        return nullcontext()

    def quantize(self, model: nn.Module, quant_config: QuantConfig, load_context: LoadContext) -> Measuring | None:
        # Intel Neural Compressor requires a real card.
        return simulation.apply(model, quant_config, load_context, GaudiArithmetic)

"""Which models are measured or quantised: the target by the environment's QUANT_CONFIG, the drafter by an option."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from vllm_gaudi_spec.attention.backend import RectangleAttentionImpl
from vllm_gaudi_spec.attention.operations import OWN
from vllm_gaudi_spec.config import ADDITIONAL_CONFIG_KEY, Options, UnsupportedConfigError
from vllm_gaudi_spec.quantization.config import drafter_config, target_config
from vllm_gaudi_spec.quantization.place import Place

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.quantization.config import QuantConfig
    from vllm_gaudi_spec.quantization.place import Measuring


@dataclass(frozen=True, slots=True)
class Quantization:
    """Of one model that is going to be loaded."""

    given: QuantConfig
    model: str
    fp8_range: str | None
    """As the user chose it."""
    theirs: nn.Module | None = None
    """A model whose parts this one may share."""

    @classmethod
    def of_target(cls, vllm_config: VllmConfig) -> Quantization | None:
        given = target_config()
        return (
            None
            if given is None
            else cls(given, vllm_config.model_config.model, Options.from_vllm(vllm_config).fp8_range)
        )

    @classmethod
    def of_drafter(cls, vllm_config: VllmConfig, target: nn.Module) -> Quantization | None:
        options, speculative = Options.from_vllm(vllm_config), vllm_config.speculative_config
        given = drafter_config(options)
        if given is None or speculative is None:
            return None
        return cls(given, speculative.draft_model_config.model, options.fp8_range, target)

    def apply(self, model: nn.Module, backend: DeviceBackend) -> Measuring | None:
        for name, module in model.named_modules():
            if isinstance(module, RectangleAttentionImpl) and self._takes_any(name):
                module.make_layer_operations()
        apart: Collection[nn.Module] = () if self.theirs is None else set(self.theirs.modules())
        place = Place(
            model=self.model,
            rank=get_tensor_model_parallel_rank(),
            world=get_tensor_model_parallel_world_size(),
            fp8_range=self._range_on(backend),
            apart=apart,
        )
        return backend.weights.quantize(model, self.given, place)

    def _range_on(self, backend: DeviceBackend) -> str | None:
        own = backend.weights.fp8_range
        if self.fp8_range is not None and own is not None and self.fp8_range != own:
            raise UnsupportedConfigError(
                f"fp8_range {self.fp8_range} in additional_config.{ADDITIONAL_CONFIG_KEY} is not that of this {own}; "
                "leave it out."
            )
        return own or self.fp8_range

    def _takes_any(self, name: str) -> bool:
        return any(self.given.takes(f"{name}.{part}", kind) for part, kind in OWN.items())

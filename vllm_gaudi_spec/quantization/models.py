"""Measures or quantizes models: the target by the variable QUANT_CONFIG, the drafter by an option."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_gaudi_spec.attention.backend import RectangleAttentionImpl
from vllm_gaudi_spec.attention.operations import OWN
from vllm_gaudi_spec.config import ADDITIONAL_CONFIG_KEY, Options, UnsupportedConfigError
from vllm_gaudi_spec.quantization.config import LoadContext, drafter_config, target_config
from vllm_gaudi_spec.upstream.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm_gaudi_spec.upstream.layers import MLAAttention, MoERunner

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.quantization.config import Measuring, QuantConfig

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization of a model that will be loaded."""

    quant_config: QuantConfig
    model: str
    fp8_range: str | None
    """The option `fp8_range`."""
    shared_with: nn.Module | None = None
    """A model with which this one may share modules."""

    @classmethod
    def of_target(cls, vllm_config: VllmConfig) -> Quantization | None:
        if (quant_config := target_config()) is None:
            return None
        return cls(quant_config, vllm_config.model_config.model, Options.from_vllm(vllm_config).fp8_range)

    @classmethod
    def of_drafter(cls, vllm_config: VllmConfig, target: nn.Module) -> Quantization | None:
        options, speculative = Options.from_vllm(vllm_config), vllm_config.speculative_config
        quant_config = drafter_config(options)
        if quant_config is None or speculative is None:
            return None
        return cls(quant_config, speculative.draft_model_config.model, options.fp8_range, target)

    def apply(self, model: nn.Module, backend: DeviceBackend) -> Measuring | None:
        shared = set() if self.shared_with is None else set(self.shared_with.modules())
        latent = set(_latent(model))
        has_experts = any(isinstance(module, MoERunner) for module in model.modules())
        if left := [what for what, found in (("experts", has_experts), ("latent attention", bool(latent))) if found]:
            logger.info(
                "%s: %s of %s stay in the model's dtype.", self.quant_config.option, " and ".join(left), self.model
            )
        for name, module in model.named_modules():
            if isinstance(module, RectangleAttentionImpl) and module not in latent:
                if any(self.quant_config.takes(f"{name}.{part}", kind) for part, kind in OWN.items()):
                    module.make_layer_operations()
        load_context = LoadContext(
            model=self.model,
            rank=get_tensor_model_parallel_rank(),
            world=get_tensor_model_parallel_world_size(),
            fp8_range=choose_fp8_range(backend, self.fp8_range),
            apart=shared | latent,
        )
        return backend.weights.quantize(model, self.quant_config, load_context)


def _latent(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of latent attention, which are never measured or quantized.

    Its cache has one row for key and value, and it absorbs `kv_b_proj`.
    """
    for module in model.modules():
        if isinstance(module, MLAAttention):
            yield module.impl
            yield module.kv_b_proj


def choose_fp8_range(backend: DeviceBackend, requested: str | None) -> str | None:
    """Return the card whose e4m3 range is used. `requested` is the option `fp8_range`."""
    device_range = backend.weights.fp8_range
    if requested is not None and device_range is not None and requested != device_range:
        raise UnsupportedConfigError(
            f"fp8_range {requested} in additional_config.{ADDITIONAL_CONFIG_KEY} is not that of this {device_range}; "
            "leave it out."
        )
    return device_range or requested

"""Measures or quantizes loaded models, according to QUANT_CONFIG and `--kv-cache-dtype fp8`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger

from vllm_gaudi_spec.attention.backend import RectangleAttentionImpl
from vllm_gaudi_spec.attention.operations import OWN
from vllm_gaudi_spec.config import E4M3_MAX, FP8_KV, GAUDI2, Options, UnsupportedConfigError
from vllm_gaudi_spec.quantization.config import LoadContext, drafter_config, target_config
from vllm_gaudi_spec.quantization.kv_scheme import suggest_model_dtype
from vllm_gaudi_spec.quantization.layers import KV_DTYPE, Fp8Cache, kv_range
from vllm_gaudi_spec.upstream.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm_gaudi_spec.upstream.kv_cache import AttentionLayerBase
from vllm_gaudi_spec.upstream.layers import MLAAttention, MoERunner

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.quantization.config import Measuring, QuantConfig

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization settings for a model that is about to be loaded."""

    quant_config: QuantConfig
    model: str
    shared_with: nn.Module | None = None
    """A model whose modules this model may share."""

    @classmethod
    def of_target(cls, vllm_config: VllmConfig) -> Quantization | None:
        if (quant_config := target_config()) is None:
            return None
        return cls(quant_config, vllm_config.model_config.model)

    @classmethod
    def of_drafter(cls, vllm_config: VllmConfig, target: nn.Module) -> Quantization | None:
        speculative = vllm_config.speculative_config
        quant_config = drafter_config(Options.from_vllm(vllm_config))
        if quant_config is None or speculative is None:
            return None
        return cls(quant_config, speculative.draft_model_config.model, target)

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
            fp8_range=backend.weights.fp8_range,
            apart=shared | latent,
        )
        return backend.weights.quantize(model, self.quant_config, load_context)


def _latent(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of latent attention, which are never measured or quantized.

    Latent attention caches one vector for both key and value and absorbs the weight of `kv_b_proj`.
    """
    for module in model.modules():
        if isinstance(module, MLAAttention):
            yield module.impl
            yield module.kv_b_proj


_GAUDI2_FACTOR = 2.0
"""The factor by which KV scales from checkpoints are multiplied on a Gaudi 2. These scales assume e4m3 values up to
448, but the maximum on a Gaudi 2 is 240. Doubling them keeps the largest values in range, as for weights (quirk Q02),
and costs values below 1/32 of the scale one bit of precision. A scale of 1 is not doubled, because it was not
measured."""


def quantize_kv(vllm_config: VllmConfig, backend: DeviceBackend, model: str, others: Collection[str]) -> None:
    """Quantize the KV caches of a newly loaded model with the checkpoint's scales, for `--kv-cache-dtype fp8`.

    Keys and values are cast to e4m3 when they are written and scaled back when they are read. This uses the same
    modules as QUANT_CONFIG. Caches that QUANT_CONFIG has already quantized are not changed.

    Args:
        model: The model's name, for use in messages.
        others: The names of layers that were loaded earlier.
    """
    if vllm_config.cache_config.cache_dtype != FP8_KV:
        return
    make = backend.weights.fp8_arithmetic
    assert make is not None, "rejected at start-up"
    fp8_range = kv_range(backend.weights.fp8_range)
    arithmetic = make(E4M3_MAX[fp8_range])
    every: dict[str, Any] = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    layers = {
        name: layer
        for name, layer in every.items()
        if name not in others and isinstance(getattr(layer, "impl", None), RectangleAttentionImpl)
    }
    remedy = suggest_model_dtype(vllm_config)
    unscaled, factor = 0, _GAUDI2_FACTOR if fp8_range == GAUDI2 else 1.0
    for name, layer in layers.items():
        if layer.impl.kv_dtype is not None:
            continue
        # A layer that reads the KV of another layer uses the scales with which that KV was written.
        owner = getattr(layer, "kv_sharing_target_layer_name", None) or name
        k_scale, v_scale = (_scale(every[owner], owner, which, remedy) for which in ("k_scale", "v_scale"))
        unscaled += bool((k_scale == 1).all() or (v_scale == 1).all())
        k_scale, v_scale = (scale if (scale == 1).all() else scale * factor for scale in (k_scale, v_scale))
        k_cache, v_cache = (Fp8Cache(scale, arithmetic, layer.impl.dtype) for scale in (k_scale, v_scale))
        layer.impl.quantize_kv(KV_DTYPE, k_cache, v_cache, arithmetic.matmul)
    if unscaled:
        logger.warning(
            "Keys or values of %d of %d layers of %s have scale 1.0, as they do without scales in the checkpoint. They "
            "are clamped to %d, and small values lose precision.",
            unscaled,
            len(layers),
            model,
            E4M3_MAX[fp8_range],
        )


def _scale(layer: Any, name: str, which: str, remedy: str) -> torch.Tensor:
    """Return a scale that vLLM has loaded, as float32 of shape [] or [heads, 1]."""
    scale: torch.Tensor = getattr(layer, f"_{which}").detach().float().cpu()
    if not (scale.isfinite() & (scale > 0)).all():
        raise UnsupportedConfigError(
            f"{which} of {name} is {scale.flatten().tolist()[0]:g}, but a scale must be above 0; correct the "
            f"checkpoint, or {remedy}."
        )
    return scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())

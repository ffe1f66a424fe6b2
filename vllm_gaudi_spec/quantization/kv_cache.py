"""Quantizes the KV caches of a loaded model for --kv-cache-dtype fp8, with the scales of its checkpoint.

Keys and values are cast to e4m3 when written and scaled back when read, by the same modules that QUANT_CONFIG uses.
Layers whose caches QUANT_CONFIG has quantized keep them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger

from vllm_gaudi_spec.attention.backend import RectangleAttentionImpl
from vllm_gaudi_spec.config import E4M3_MAX, FP8_KV, GAUDI2, Options, UnsupportedConfigError
from vllm_gaudi_spec.quantization.kv_scheme import suggest_model_dtype
from vllm_gaudi_spec.quantization.layers import KV_DTYPE, Fp8Cache, kv_range
from vllm_gaudi_spec.quantization.models import choose_fp8_range
from vllm_gaudi_spec.upstream.kv_cache import AttentionLayerBase

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.config import VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend

logger = init_logger(__name__)

_GAUDI2_FACTOR = 2.0
"""Scales of checkpoints are for e4m3 up to 448, but a Gaudi 2 has numbers up to 240. Doubling the scale keeps larger
numbers, as lesson Q02 does for weights, and costs numbers below 1/32 of the scale one bit. A scale of 1 is not doubled,
as it was not made for any numbers."""


def quantize_kv(vllm_config: VllmConfig, backend: DeviceBackend, model: str, others: Collection[str]) -> None:
    """Quantize the KV of the layers that were just loaded.

    Args:
        model: The model's name, for messages.
        others: The names of layers that were loaded before.
    """
    if vllm_config.cache_config.cache_dtype != FP8_KV:
        return
    make = backend.weights.fp8_arithmetic
    assert make is not None, "refused at start-up"
    fp8_range = kv_range(choose_fp8_range(backend, Options.from_vllm(vllm_config).fp8_range))
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
        # A layer that reads another layer's KV uses the scales with which it was written.
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
    """Return a scale that vLLM has loaded, as float32 [] or [heads, 1]."""
    scale: torch.Tensor = getattr(layer, f"_{which}").detach().float().cpu()
    if not (scale.isfinite() & (scale > 0)).all():
        raise UnsupportedConfigError(
            f"{which} of {name} is {scale.flatten().tolist()[0]:g}, but a scale must be above 0; correct the "
            f"checkpoint, or {remedy}."
        )
    return scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())

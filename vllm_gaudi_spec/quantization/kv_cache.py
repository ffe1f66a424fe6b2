"""KV in FP8 by --kv-cache-dtype: the caches of a loaded model's layers, with the scales of its checkpoint.

A key or value is cast to e4m3 as it is written and scaled back as it is read, by the same modules that a QUANT_CONFIG
puts there; a layer whose caches a QUANT_CONFIG has quantized keeps those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger

from vllm_gaudi_spec.attention.backend import RectangleAttentionImpl
from vllm_gaudi_spec.config import E4M3_MAX, FP8_KV, GAUDI2, Options, UnsupportedConfigError
from vllm_gaudi_spec.quantization.kv_scheme import how_to_keep_the_models_dtype
from vllm_gaudi_spec.quantization.layers import KV_DTYPE, Fp8Cache, kv_range
from vllm_gaudi_spec.quantization.models import range_on
from vllm_gaudi_spec.upstream.kv_cache import AttentionLayerBase

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.config import VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.quantization.fp8 import Arithmetic

logger = init_logger(__name__)

_GAUDI2_FACTOR = 2.0
"""Checkpoints' scales are for e4m3 up to 448, and a Gaudi 2 ends at 240. Twice the scale keeps what is past 240 (lesson
Q02 does the same to weights), and costs a bit of numbers below a 32nd of the scale. Not of a scale of 1, which was not
made for any numbers."""


def quantize_kv(vllm_config: VllmConfig, backend: DeviceBackend, model: str, others: Collection[str]) -> None:
    """Of the layers that were just loaded. `model`: its name, for messages. `others`: names of layers that were there
    before it."""
    if vllm_config.cache_config.cache_dtype != FP8_KV:
        return
    make = backend.weights.fp8_arithmetic
    assert make is not None, "refused at start-up"
    fp8_range = kv_range(range_on(backend, Options.from_vllm(vllm_config).fp8_range))
    arithmetic = make(E4M3_MAX[fp8_range])
    layers: dict[str, Any] = {
        name: layer
        for name, layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).items()
        if name not in others and isinstance(getattr(layer, "impl", None), RectangleAttentionImpl)
    }
    remedy = how_to_keep_the_models_dtype(vllm_config)
    unscaled, factor = 0, _GAUDI2_FACTOR if fp8_range == GAUDI2 else 1.0
    for name, layer in layers.items():
        if layer.impl.kv_dtype is not None:
            continue
        # A layer that reads the KV of another one reads it by the scales that it was written with.
        owner = getattr(layer, "kv_sharing_target_layer_name", None) or name
        k_scale, v_scale = (_scale(layers[owner], owner, which, remedy) for which in ("k_scale", "v_scale"))
        unscaled += bool((k_scale == 1).all() or (v_scale == 1).all())
        k_scale, v_scale = (scale if (scale == 1).all() else scale * factor for scale in (k_scale, v_scale))
        _quantize_layer(layer.impl, k_scale, v_scale, arithmetic)
    if unscaled:
        logger.warning(
            "Keys or values of %d of %d layers of %s have scale 1.0, as they do without scales in the checkpoint: they "
            "are cut at %d, and small ones are coarse.",
            unscaled,
            len(layers),
            model,
            E4M3_MAX[fp8_range],
        )


def _quantize_layer(
    impl: RectangleAttentionImpl, k_scale: torch.Tensor, v_scale: torch.Tensor, arithmetic: Arithmetic
) -> None:
    k_cache, v_cache = (Fp8Cache(scale, arithmetic, impl.dtype) for scale in (k_scale, v_scale))
    impl.quantize_kv(KV_DTYPE, k_cache, v_cache, arithmetic.matmul)


def _scale(layer: Any, name: str, which: str, remedy: str) -> torch.Tensor:
    """float32 [] or [heads, 1], as vLLM has loaded it."""
    scale: torch.Tensor = getattr(layer, f"_{which}").detach().float().cpu()
    if not (scale.isfinite() & (scale > 0)).all():
        raise UnsupportedConfigError(
            f"{which} of {name} is {scale.flatten().tolist()[0]:g}, and a scale is a number above 0; correct the "
            f"checkpoint, or {remedy}."
        )
    return scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())

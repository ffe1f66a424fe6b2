"""Chooses the dtype of the KV cache, based on the user's option, the schemes in checkpoints, and the device.

A scheme is the part of a checkpoint's quantization configuration that describes quantized KV. vLLM applies it when it
creates layers, which is too late for errors, so schemes are accepted or dropped here. The target and its drafter use
the same dtype, because their KV caches share memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_gaudi_spec.config import FP8_KV, get_target_config
from vllm_gaudi_spec.upstream.platforms import get_kv_cache_quant_algo_string

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)

# Alternative names for e4m3 in vLLM and vllm-gaudi.
_E4M3_NAMES = ("fp8", "fp8_inc")
_AUTO = "auto"
# If the checkpoint has a KV scheme, these values of --kv-cache-dtype select the model's dtype, even if it is float32,
# for which vLLM has no value.
_UNQUANTIZED = ("bfloat16", "float16")
BY_HEAD = "attn_head"
"""The strategy of compressed-tensors schemes that have one scale per head rather than one scale for all heads."""
_STRATEGIES = ("tensor", BY_HEAD)
_SET_ASIDE = "kv_cache_scheme_set_aside"
"""The name of an attribute that marks a model configuration whose scheme was dropped, although the checkpoint contains
the scheme's scales and zero points."""
_OF_SCHEMES = re.compile(r"\.[qkv]_(?:scale|zero_point)$")


def choose_kv_dtype(vllm_config: VllmConfig, model: ModelConfig, *, has_fp8: bool) -> None:
    """Set the dtype of KV before anything is loaded. Call this function first for the target and then for its drafter.

    Args:
        has_fp8: Whether the device supports FP8 KV.
    """
    cache, is_target = vllm_config.cache_config, model is get_target_config(vllm_config)
    dtype = str(model.dtype).removeprefix("torch.")
    if cache.cache_dtype in _E4M3_NAMES:
        cache.cache_dtype = FP8_KV
    elif cache.cache_dtype == dtype or (cache.cache_dtype in _UNQUANTIZED and _asks_for_quantized_kv(model)):
        _set_aside(vllm_config, model)  # the user's option overrides the checkpoint's scheme
        cache.cache_dtype = _AUTO
    for written in _quantization_configs(model):
        # For ModelOpt formats, vLLM has already set the dtype, and whether the user also set it is unknown. For
        # compressed-tensors, vLLM takes the dtype from the scheme later.
        taken = cache.cache_dtype != _AUTO and cache.cache_dtype == get_kv_cache_quant_algo_string(written)
        scheme = None if taken else written.get("kv_cache_scheme")
        is_supported = cache.cache_dtype == FP8_KV if taken else scheme is not None and _is_served(scheme, model)
        is_served = has_fp8 and is_supported
        if is_target and taken and not is_served:
            cache.cache_dtype = _AUTO
        elif scheme and is_target and is_served and cache.cache_dtype == _AUTO:
            cache.cache_dtype = FP8_KV
            continue
        elif scheme and not (is_served and cache.cache_dtype == FP8_KV):
            _set_aside(vllm_config, model)
        else:
            continue
        logger.warning_once(
            "%s requests a quantized KV cache%s: KV is kept in %s, and the scales in its files are not used.",
            model.model,
            ", and a drafter keeps KV as its target does"
            if is_served and not is_target
            else " that is not supported here",
            FP8_KV if cache.cache_dtype == FP8_KV else dtype,
        )


def suggest_model_dtype(vllm_config: VllmConfig) -> str:
    """Return advice on how to keep KV in the model's dtype. It depends on whether the checkpoint or the user requests
    FP8."""
    target = get_target_config(vllm_config)
    if _asks_for_quantized_kv(target):
        return f"use --kv-cache-dtype bfloat16, which keeps the KV of {target.model} in the model's dtype"
    return "leave out --kv-cache-dtype"


def was_set_aside(model: ModelConfig) -> bool:
    """Whether the checkpoint's KV scheme was dropped, so that its scales are not read."""
    return any(written.get(_SET_ASIDE) for written in _quantization_configs(model))


def drop_scales_set_aside(
    tensors: Iterable[tuple[str, torch.Tensor]], model: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's tensors, except the scales of a KV scheme that was dropped.

    Layers may have no parameters for these scales, or they would use them for FP8 KV, for which the scales are wrong.
    """
    drops = was_set_aside(model)
    return (pair for pair in tensors if not (drops and _OF_SCHEMES.search(pair[0])))


def list_schemes(model: ModelConfig) -> list[dict[str, Any]]:
    """Return the compressed-tensors KV schemes of a model that have not been dropped."""
    written = (written.get("kv_cache_scheme") for written in _quantization_configs(model))
    return [scheme for scheme in written if isinstance(scheme, dict) and "strategy" in scheme]


def _is_served(scheme: dict[str, Any], model: ModelConfig) -> bool:
    return (
        scheme.get("num_bits") == 8
        and scheme.get("type") == "float"
        and bool(scheme.get("symmetric"))
        and scheme.get("strategy") in _STRATEGIES
        and not (model.use_mla and scheme["strategy"] == BY_HEAD)  # latent keys do not belong to heads
    )


def _set_aside(vllm_config: VllmConfig, model: ModelConfig) -> None:
    for written in _quantization_configs(model):
        if written.get("kv_cache_scheme"):
            written |= {"kv_cache_scheme": None, _SET_ASIDE: True}
    if model is vllm_config.model_config and getattr(vllm_config.quant_config, "kv_cache_scheme", None):
        vllm_config.quant_config.kv_cache_scheme = None


def _asks_for_quantized_kv(model: ModelConfig) -> bool:
    return any(
        written.get("kv_cache_scheme") or get_kv_cache_quant_algo_string(written) not in (None, _AUTO)
        for written in _quantization_configs(model)
    )


def _quantization_configs(model: ModelConfig) -> Iterator[dict[str, Any]]:
    """Yield a model's quantization configurations from all places in which vLLM looks for them."""
    described = (model.hf_config, model.hf_text_config)
    for config in described if described[0] is not described[1] else described[:1]:
        for name in ("quantization_config", "compression_config"):
            if isinstance(written := getattr(config, name, None), dict):
                yield written

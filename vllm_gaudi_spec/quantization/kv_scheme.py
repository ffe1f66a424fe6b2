"""In which dtype KV is kept: what the user chose, what the checkpoints ask for, and what the device can do.

One dtype serves the target and its drafter, whose layers share memory. vLLM follows a checkpoint's scheme while it
makes the layers, long after configurations were looked at; so it is taken or set aside here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_gaudi_spec.config import FP8_KV, get_target_config
from vllm_gaudi_spec.upstream.utils import get_kv_cache_quant_algo_string

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)

# vLLM's other names for e4m3; the last is the one of vllm-gaudi.
_E4M3_NAMES = ("fp8", "fp8_inc")
_AUTO = "auto"
# vLLM has no name for float32: against a checkpoint's scheme these mean the model's dtype, whatever it is.
_UNQUANTIZED = ("bfloat16", "float16")
BY_HEAD = "attn_head"
"""The strategy of a compressed-tensors scheme with a scale for each head; else there is one for all."""
_STRATEGIES = ("tensor", BY_HEAD)
_SET_ASIDE = "kv_cache_scheme_set_aside"
"""Beside a scheme that is: the checkpoint has its scales and zero points all the same."""
_OF_SCHEMES = re.compile(r"\.[qkv]_(?:scale|zero_point)$")


def choose_kv_dtype(vllm_config: VllmConfig, model: ModelConfig, *, has_fp8: bool) -> None:
    """Before anything is loaded, for the target and then for a drafter beside it. `has_fp8`: whether the device keeps
    KV in FP8."""
    cache, is_target = vllm_config.cache_config, model is get_target_config(vllm_config)
    dtype = str(model.dtype).removeprefix("torch.")
    if cache.cache_dtype in _E4M3_NAMES:
        cache.cache_dtype = FP8_KV
    elif cache.cache_dtype == dtype or (cache.cache_dtype in _UNQUANTIZED and _asks_for_quantized_kv(model)):
        _set_aside(vllm_config, model)  # the user's choice, against the checkpoint
        cache.cache_dtype = _AUTO
    for written in _quantization_configs(model):
        # Of modelopt's formats vLLM has taken the dtype already, and whether the user named it too is lost; of
        # compressed-tensors' it takes it from the scheme.
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
            "%s asks for a quantized KV cache%s: KV is kept in %s, and the scales of its files are not used.",
            model.model,
            ", and a drafter keeps KV as its target does"
            if is_served and not is_target
            else " that is not supported here",
            FP8_KV if cache.cache_dtype == FP8_KV else dtype,
        )


def how_to_keep_the_models_dtype(vllm_config: VllmConfig) -> str:
    """What to do about KV in FP8, for messages: it depends on who asks for it."""
    target = get_target_config(vllm_config)
    if _asks_for_quantized_kv(target):
        return f"use --kv-cache-dtype bfloat16, which keeps the KV of {target.model} in the model's dtype"
    return "leave out --kv-cache-dtype"


def was_set_aside(model: ModelConfig) -> bool:
    """Whether nothing of a scheme is read that the checkpoint's files may have."""
    return any(written.get(_SET_ASIDE) for written in _quantization_configs(model))


def drop_scales_set_aside(
    tensors: Iterable[tuple[str, torch.Tensor]], model: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's tensors without those of a scheme that was set aside: layers may have no parameters of
    their shape, and would keep others for FP8 that they were not made for."""
    drops = was_set_aside(model)
    return (pair for pair in tensors if not (drops and _OF_SCHEMES.search(pair[0])))


def schemes_of(model: ModelConfig) -> list[dict[str, Any]]:
    """Those of compressed-tensors that were not set aside."""
    written = (written.get("kv_cache_scheme") for written in _quantization_configs(model))
    return [scheme for scheme in written if isinstance(scheme, dict) and "strategy" in scheme]


def _is_served(scheme: dict[str, Any], model: ModelConfig) -> bool:
    return (
        scheme.get("num_bits") == 8
        and scheme.get("type") == "float"
        and bool(scheme.get("symmetric"))
        and scheme.get("strategy") in _STRATEGIES
        and not (model.use_mla and scheme["strategy"] == BY_HEAD)  # latent keys are of no head
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
    """Where vLLM looks for them."""
    described = (model.hf_config, model.hf_text_config)
    for config in described if described[0] is not described[1] else described[:1]:
        for name in ("quantization_config", "compression_config"):
            if isinstance(written := getattr(config, name, None), dict):
                yield written

"""Quantised KV that a checkpoint asks for, which is not served yet: KV is kept in the model's dtype instead.

vLLM follows such a scheme while it makes the layers, long after configurations were looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

from vllm_gaudi_spec.config import target_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)


def set_aside_kv_scheme(vllm_config: VllmConfig, model: ModelConfig) -> None:
    """Before anything is loaded. `model`: the target, or a drafter beside it."""
    cache, is_target = vllm_config.cache_config, model is target_of(vllm_config)
    for written in _quantization_configs(model):
        # Of modelopt's formats vLLM has taken the dtype already, and whether the user named it too is lost; of
        # compressed-tensors' it takes it from the scheme.
        if is_target and cache.cache_dtype != "auto" and cache.cache_dtype == get_kv_cache_quant_algo_string(written):
            cache.cache_dtype = "auto"
        elif cache.cache_dtype == "auto" and written.get("kv_cache_scheme"):
            written["kv_cache_scheme"] = None
            if model is vllm_config.model_config and vllm_config.quant_config is not None:
                vllm_config.quant_config.kv_cache_scheme = None
        else:
            continue
        logger.warning_once(
            "%s asks for a quantised KV cache, which is not supported yet: KV is kept in %s, which takes %d times the "
            "memory of 8 bits, and its scales are not used.",
            model.model,
            str(model.dtype).removeprefix("torch."),
            model.dtype.itemsize,
        )


def _quantization_configs(model: ModelConfig) -> Iterator[dict[str, Any]]:
    """Where vLLM looks for them."""
    described = (model.hf_config, model.hf_text_config)
    for config in described if described[0] is not described[1] else described[:1]:
        for name in ("quantization_config", "compression_config"):
            if isinstance(written := getattr(config, name, None), dict):
                yield written

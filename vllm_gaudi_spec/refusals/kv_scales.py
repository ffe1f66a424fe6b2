"""Refusals of scales for FP8 KV that the loader would accept, or on which it would fail in the engine's process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from safetensors import safe_open

from vllm_gaudi_spec.config import FP8_KV
from vllm_gaudi_spec.quantization.fingerprint import find_model_folder
from vllm_gaudi_spec.quantization.kv_scheme import BY_HEAD, list_schemes, suggest_model_dtype, was_set_aside
from vllm_gaudi_spec.refusals.files import find_weight_files
from vllm_gaudi_spec.refusals.models import list_models

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend

# Names of scales in checkpoints that vLLM's loader recognizes.
_SCALE = re.compile(r"\.(?:kv?_scale|v_scale|[kv]_cache\.scale|[kv]_proj\.output_scale)$")


def kv_scale_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    if vllm_config.cache_config.cache_dtype != FP8_KV:
        return
    for model, load_format in list_models(vllm_config):
        if model.quantization is not None and not was_set_aside(model):  # the loader reads no scales of other models
            remedy = suggest_model_dtype(vllm_config)
            yield from (f"{fault}; correct the checkpoint, or {remedy}." for fault in _scale_faults(model, load_format))


def _scale_faults(model: ModelConfig, load_format: str) -> Iterator[str]:
    """Yield what is wrong with scales in a model's local files."""
    folder = find_model_folder(model.model)
    if folder is None or (read := find_weight_files(folder, load_format)) is None:
        return
    by_head = any(scheme["strategy"] == BY_HEAD for scheme in list_schemes(model))
    num_scales = model.get_total_num_kv_heads() if by_head else 1
    for file in sorted(folder.glob(read[0])):
        with safe_open(file, "pt") as tensors:
            for name in filter(_SCALE.search, tensors.keys()):
                scale = tensors.get_tensor(name).float()
                if scale.numel() != num_scales:
                    fault = f"has shape {list(scale.shape)}, and there should be {num_scales} of it"
                elif not (right := scale.isfinite() & (scale > 0)).all():
                    fault = f"is {scale[~right].flatten()[0].item():g}, and a scale is a finite number above 0"
                else:
                    continue
                yield f"{name} in {file} {fault}"

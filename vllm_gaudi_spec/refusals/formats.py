"""Checks that reject weight formats, and invalid scales that the loader would accept or that fail later."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from vllm_gaudi_spec.config import (
    ADDITIONAL_CONFIG_KEY,
    FLOAT16,
    FP8_KV,
    NATIVE,
    OTHER_MODEL,
    Options,
    get_target_config,
)
from vllm_gaudi_spec.methods import has_model
from vllm_gaudi_spec.quantization.checkpoint import find_misfit
from vllm_gaudi_spec.quantization.config import (
    NEEDS_CALIBRATION,
    drafter_config,
    hostile_scales,
    missing_scales,
    target_config,
)
from vllm_gaudi_spec.quantization.dequantized import (
    DEQUANTIZED,
    described,
    format_if_read,
    format_of,
)
from vllm_gaudi_spec.quantization.fingerprint import find_model_folder
from vllm_gaudi_spec.quantization.formats import UnknownFormatError
from vllm_gaudi_spec.quantization.kv_scheme import BY_HEAD, list_schemes, suggest_model_dtype, was_set_aside
from vllm_gaudi_spec.refusals.files import find_weight_files
from vllm_gaudi_spec.refusals.models import list_models

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.quantization.config import QuantConfig
    from vllm_gaudi_spec.quantization.formats import CheckpointFormat


def format_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    for model, load_format in list_models(vllm_config):
        if model.quantization is None:
            continue
        if model.quantization == DEQUANTIZED:
            yield from _dequantization_refusals(model, load_format)
        elif (reason := backend.weights.missing_kernel(vllm_config, model)) is not None:
            yield from _kernel_refusals(vllm_config, model, reason)
        # vLLM's own kernels need the same tensors, but vLLM does not check these tensors.
        elif (format := format_if_read(model)) is not None:
            yield from _tensor_refusals(model, format, load_format, damage_alone=True)


def _kernel_refusals(vllm_config: VllmConfig, model: ModelConfig, reason: str) -> Iterator[str]:
    """Yield reasons why a model cannot use the native kernels selected by --quantization or `weight_kernels`."""
    if not described(model):
        option = f"--quantization {model.quantization}"
        if model is not vllm_config.model_config:
            option = f"quantization {model.quantization} in --speculative-config"
        yield f"{option} names a format {reason}; leave it out."
        return
    remedy = "leave --quantization out"
    try:
        format_of(model)
        if Options.from_vllm(vllm_config).weight_kernels == NATIVE:
            remedy = "leave weight_kernels out"
    except UnknownFormatError:
        remedy = OTHER_MODEL
    yield f"{model.model} has quantized weights ({model.quantization}), {reason}; {remedy}."


def _dequantization_refusals(model: ModelConfig, load_format: str) -> Iterator[str]:
    """Yield reasons to reject a checkpoint that would be dequantized while loading."""
    try:
        format = format_of(model)
    except UnknownFormatError as error:
        yield f"{model.model} has quantized weights, which {error}; {OTHER_MODEL}."
        return
    if load_format != "dummy" and find_weight_files(Path(model.model), load_format) is None:
        yield (
            f"{model.model} has quantized weights, which cannot be read with --load-format {load_format}; leave it out."
        )
    yield from _tensor_refusals(model, format, load_format)


def _tensor_refusals(
    model: ModelConfig, format: CheckpointFormat, load_format: str, damage_alone: bool = False
) -> Iterator[str]:
    """Yield a reason for the first tensor in a local folder that is not valid in the format."""
    folder = Path(model.model)
    if load_format == "dummy" or (files := find_weight_files(folder, load_format)) is None or not folder.is_dir():
        return
    from vllm_gaudi_spec.upstream.models import filter_duplicate_safetensors_files

    found = filter_duplicate_safetensors_files(sorted(map(str, folder.glob(files[0]))), str(folder), files[1])
    if (reason := find_misfit(model.model, format, map(Path, found), damage_alone=damage_alone)) is not None:
        yield reason


def weight_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    cpu_weights, model = Options.from_vllm(vllm_config).cpu_weights, vllm_config.model_config
    name = f"additional_config.{ADDITIONAL_CONFIG_KEY}.cpu_weights"
    if cpu_weights is None or model is not get_target_config(vllm_config):
        return  # the weights of a drafter may have a different format
    if not backend.traits.takes_cpu_weights:
        yield f"{name} is for device cpu, and this is {backend.traits.name}; leave it out."
    if str(model.dtype) != "torch.float32":
        yield f"{name} is for models that run in float32; leave it out, or use --dtype float32."
    if model.quantization is not None:
        yield f"{model.model} has quantized weights ({model.quantization}); leave {name} out."
    if cpu_weights == FLOAT16 and vllm_config.cache_config.cache_dtype == FP8_KV:
        # The kernel's rounding depends on the number of rows, and a difference of one bit can change the FP8 value.
        yield f"{name} float16 may round KV to FP8 differently in verify steps and plain steps; leave it out."


def quantization_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    options, model = Options.from_vllm(vllm_config), vllm_config.model_config
    spec_config = vllm_config.speculative_config
    if model is not get_target_config(vllm_config):
        return  # this is a drafter's copy of a configuration that has already been checked
    quantized = [] if (target := target_config()) is None else [(target, model)]
    if (drafter := drafter_config(options)) is not None:
        if spec_config is None or not has_model(spec_config.method):
            yield f"{drafter.option} is for drafters that are models; leave it out."
            return
        quantized.append((drafter, spec_config.draft_model_config))
    if target is not None and options.cpu_weights is not None:
        name = f"additional_config.{ADDITIONAL_CONFIG_KEY}.cpu_weights"
        yield f"QUANT_CONFIG decides the format of weights; leave {name} out."
    for config, of_model in quantized:
        yield from _quantized_model_refusals(config, of_model, backend)
        if vllm_config.parallel_config.data_parallel_size > 1:
            yield f"{config.option} does not work with data parallelism; use --data-parallel-size 1, or unset it."
        if config.measures:
            # Measuring overwrites files from earlier runs.
            if backend.traits.simulates_quantization and not vllm_config.parallel_config.worker_extension_cls:
                yield f"{config.option}: {NEEDS_CALIBRATION}"
            continue
        if backend.traits.takes_quant_config and not backend.traits.simulates_quantization:
            yield from hostile_scales(config)
        else:
            parallel = vllm_config.parallel_config
            if spec_config is not None and of_model is spec_config.draft_model_config:
                parallel = spec_config.draft_parallel_config
            yield from missing_scales(config, parallel.tensor_parallel_size)


def _quantized_model_refusals(config: QuantConfig, model: ModelConfig, backend: DeviceBackend) -> Iterator[str]:
    if not backend.traits.takes_quant_config:
        yield f"{config.option} is not supported on device {backend.traits.name}; unset it."
    elif backend.traits.simulates_quantization:
        yield from config.unsimulated_refusals()
    if getattr(model.hf_text_config, "num_kv_shared_layers", 0):
        yield f"{model.model} has layers that share KV, which {config.option} does not serve yet; unset it."
    if model.quantization is not None:
        yield f"{model.model} has quantized weights ({model.quantization}); unset {config.option}."


# --- scales for FP8 KV ---

# Names of scales in checkpoints that vLLM's loader recognizes.
_SCALE = re.compile(r"\.(?:kv?_scale|v_scale|[kv]_cache\.scale|[kv]_proj\.output_scale)$")


def kv_scale_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    if vllm_config.cache_config.cache_dtype != FP8_KV:
        return
    for model, load_format in list_models(vllm_config):
        if model.quantization is not None and not was_set_aside(model):  # the scales of other models are not read
            remedy = suggest_model_dtype(vllm_config)
            yield from (f"{fault}; correct the checkpoint, or {remedy}." for fault in _scale_faults(model, load_format))


def _scale_faults(model: ModelConfig, load_format: str) -> Iterator[str]:
    """Yield problems with the scales in a model's local files."""
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
                    fault = f"has shape {list(scale.shape)}, but its size must be {num_scales}"
                elif not (right := scale.isfinite() & (scale > 0)).all():
                    fault = f"is {scale[~right].flatten()[0].item():g}, but a scale must be a finite number above 0"
                else:
                    continue
                yield f"{name} in {file} {fault}"

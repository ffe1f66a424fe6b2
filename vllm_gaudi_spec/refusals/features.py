"""Checks that reject unsupported vLLM features."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from vllm import envs

from vllm_gaudi_spec.config import (
    ADDITIONAL_CONFIG_KEY,
    FP8_KV,
    REFERENCE,
    Options,
    UnsupportedConfigError,
    get_target_config,
)
from vllm_gaudi_spec.quantization.config import drafter_config, target_config
from vllm_gaudi_spec.quantization.dequantized import DEQUANTIZED, format_of, is_native
from vllm_gaudi_spec.quantization.kv_scheme import suggest_model_dtype
from vllm_gaudi_spec.recurrent.table import has_states
from vllm_gaudi_spec.refusals.speculation import list_installed_logits_processors
from vllm_gaudi_spec.upstream.release import uses_older_ray_executor

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend


# Maps each unsupported feature, as a field of vLLM's configuration, to the option that enables it.
_UNSUPPORTED = {
    "parallel_config.enable_dbo": "--enable-dbo",
    "parallel_config.enable_elastic_ep": "--enable-elastic-ep",
    "parallel_config.enable_eplb": "--enable-eplb",
    # Instead of exiting, a failed engine would wait for a recovery that our workers do not implement.
    "parallel_config.enable_fault_tolerance": "--enable-fault-tolerance",
    "cache_config.kv_offloading_size": "--kv-offloading-size",
    "cache_config.kv_sharing_fast_prefill": "--kv-sharing-fast-prefill",
    "offload_config.prefetch.offload_group_size": "--offload-group-size",
    "offload_config.uva.cpu_offload_gb": "--cpu-offload-gb",
    "model_config.enable_nccl_comm_suspend": "--enable-nccl-comm-suspend",
    "model_config.sleep_mode_offload_cudagraph": "--sleep-mode-offload-cudagraph",
    "model_config.sleep_preserve_parameter_names": "--sleep-preserve-parameter-names",
    "model_config.enable_prompt_embeds": "--enable-prompt-embeds",
    "model_config.enable_trace_replay": "--enable-trace-replay",
    "model_config.return_sampling_mask": "--return-sampling-mask",
    "aux_output_config.enable_return_routed_experts": "--enable-return-routed-experts",
    "diffusion_config": "--diffusion-config",
    "ec_transfer_config": "--ec-transfer-config",
    "watermark_config": "--watermark-config",
    "weight_transfer_config": "--weight-transfer-config",
}


def feature_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "Context parallelism is not supported; use 1 for the decode and prefill context parallel sizes."
    if parallel.use_ray and uses_older_ray_executor():
        yield "vLLM's older executor for Ray is not supported; unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND."
    for path, option in _UNSUPPORTED.items():
        if attrgetter(path)(vllm_config):
            yield f"{option} is not supported; leave it out."
    yield from _pipeline_refusals(vllm_config, backend)
    yield from _connector_refusals(vllm_config, backend)
    yield from _profiler_refusals(vllm_config)
    yield from _kv_dtype_refusals(vllm_config, backend)
    if model.is_diffusion:
        yield f"{model.model} is a diffusion language model, which is not supported; use an autoregressive one."
    if envs.VLLM_BATCH_INVARIANT:
        yield "Batch invariance is not supported; unset VLLM_BATCH_INVARIANT."
    for name, instead in _VLLM_ASCEND_OPTIONS.items():
        if name in (vllm_config.additional_config or {}):
            yield f"additional_config.{name} is vllm-ascend's and has no effect here; leave it out{instead}."


def _pipeline_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    """Yield reasons to reject features that were not tested with pipeline parallelism, except for drafters."""
    model, parallel, options = vllm_config.model_config, vllm_config.parallel_config, Options.from_vllm(vllm_config)
    untested = {
        f"device {backend.traits.name}": not backend.traits.runs_stages,
        "--data-parallel-size": parallel.data_parallel_size > 1,
        "--kv-transfer-config": vllm_config.kv_transfer_config,
        "--enable-sleep-mode": model.enable_sleep_mode,
        "--enable-lora": vllm_config.lora_config,
        "custom logits processors": model.logits_processors or list_installed_logits_processors(),
        "--distributed-executor-backend external_launcher": parallel.distributed_executor_backend
        == "external_launcher",
        "QUANT_CONFIG": target_config(),
        f"draft_quant_config in additional_config.{ADDITIONAL_CONFIG_KEY}": options.draft_quant_config,
        f"audit_every in additional_config.{ADDITIONAL_CONFIG_KEY}": options.audit_every,
        "multimodal models": model.is_multimodal_model,
        "pooling models": model.runner_type == "pooling",
        "recurrent layers": model.has_inner_state,
    }
    for what in (what for what, is_used in untested.items() if is_used and parallel.pipeline_parallel_size > 1):
        yield f"Pipeline parallelism is not supported with {what}; use --pipeline-parallel-size 1."


_CONNECTORS = ("ExampleConnector", "NixlConnector", "OffloadingConnector")
"""vLLM connectors that were tested with this plugin, either alone or, except for the last, in a MultiConnector."""
OFFLOADING = dict(spec_name="HostOffloadingSpec", spec_module_path="vllm_gaudi_spec.upstream.kv_offload")
"""Options with which vLLM's `OffloadingConnector` copies KV with PyTorch instead of CUDA."""


def _connector_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    config, model = vllm_config.kv_transfer_config, vllm_config.model_config
    if config is None:
        return
    leave_out = "leave out --kv-transfer-config"
    if not backend.traits.shares_kv_caches:
        yield f"KV connectors are not supported on {backend.traits.name}; {leave_out}."
    if model.runner_type == "pooling" or has_states(model):
        yield f"KV connectors are for models that generate and keep all context in KV; {leave_out} for {model.model}."
    parts = [vars(config)]
    if config.kv_connector == "MultiConnector":
        parts = config.kv_connector_extra_config.get("connectors", [])
    if model.enable_sleep_mode:
        yield "Sleep frees the KV that other servers read; leave out --enable-sleep-mode or --kv-transfer-config."
    names = {str(part.get("kv_connector")) for part in parts}
    if not names:
        yield "MultiConnector has no connectors; list them in kv_connector_extra_config of --kv-transfer-config."
    if others := sorted(names - set(_CONNECTORS)):
        yield f"KV connector {others[0]} is not supported; use {' or '.join(_CONNECTORS)} in --kv-transfer-config."
    if "OffloadingConnector" in names:
        options = config.kv_connector_extra_config
        if any(options.get(name, value) != value for name, value in OFFLOADING.items()):
            yield f"OffloadingConnector copies KV with this plugin's own code; leave out {' and '.join(OFFLOADING)}."
        if "cpu_bytes_to_use" not in options or options.keys() & {"block_size", "blocks_per_chunk"}:
            yield "OffloadingConnector works only alone; set cpu_bytes_to_use, without block_size and blocks_per_chunk."
    if config.kv_load_failure_policy == "recompute" and names - {"NixlConnector"}:
        # A connector that loads KV before a forward pass may report a failure only after the step's tokens are sampled.
        yield "kv_load_failure_policy recompute works only with NixlConnector; set it to fail in --kv-transfer-config."
    if examples := [part for part in parts if part.get("kv_connector") == "ExampleConnector"]:
        # After a prompt's first chunk, ExampleConnector stores the whole prompt under a name based only on its tokens.
        if vllm_config.scheduler_config.enable_chunked_prefill:
            yield "ExampleConnector cannot store prompts in chunks; use --no-enable-chunked-prefill."
        if vllm_config.parallel_config.world_size > 1:
            yield "ExampleConnector stores the KV of one rank; use NixlConnector, or --tensor-parallel-size 1."
        if vllm_config.lora_config is not None:
            yield "ExampleConnector does not distinguish adapters; leave out --enable-lora."
        if any("shared_storage_path" not in (part.get("kv_connector_extra_config") or {}) for part in examples):
            yield "ExampleConnector needs a folder; set shared_storage_path in its kv_connector_extra_config."


def refuse_sleep(vllm_config: VllmConfig | None, backend: DeviceBackend, level: int = 1) -> None:
    """Reject sleep mode if this device or, if it is given, this configuration does not support it."""
    remedy = "and call wake_up if requests wait"
    if not backend.traits.sleeps:
        where = f"{backend.traits.name} in {backend.traits.mode} mode, whose graphs contain memory addresses"
        raise UnsupportedConfigError(f"Sleep is not supported on {where}; leave out --enable-sleep-mode, {remedy}.")
    if vllm_config is None:
        return
    if vllm_config.kv_transfer_config is not None:
        raise UnsupportedConfigError(
            f"Sleep would free the KV that other servers read; leave out --kv-transfer-config, {remedy}."
        )
    if level > 1 and (reason := _find_fixed_weights(vllm_config, backend)):
        raise UnsupportedConfigError(
            f"Sleep level 2 drops weights, which an engine with {reason} cannot load again; use level 1, {remedy}."
        )


def refuse_new_weights(vllm_config: VllmConfig, backend: DeviceBackend) -> None:
    if reason := _find_fixed_weights(vllm_config, backend):
        raise UnsupportedConfigError(
            f"A running engine with {reason} cannot replace its weights; start another engine."
        )


def _find_fixed_weights(vllm_config: VllmConfig, backend: DeviceBackend) -> str | None:
    """Return the reason why weights cannot be replaced, or None.

    One reason is that steps may use converted copies of the weights.
    """
    spec_config, options = vllm_config.speculative_config, Options.from_vllm(vllm_config)
    models = [vllm_config.model_config, getattr(spec_config, "draft_model_config", None) or vllm_config.model_config]
    reasons = {
        f"device {backend.traits.name}": not backend.traits.updates_weights,
        "quantization": any(one.quantization for one in models) or target_config() or drafter_config(options),
        "latent attention": any(one.use_mla for one in models),
        "experts": any(one.is_moe for one in models),
        "recurrent layers": any(one.has_inner_state for one in models),
        "a parallel head": getattr(spec_config, "parallel_drafting", False),
        "LoRA adapters": vllm_config.lora_config,
        "pipeline stages": vllm_config.parallel_config.pipeline_parallel_size > 1,
        "a KV connector, which may hold KV of the old weights": vllm_config.kv_transfer_config,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _profiler_refusals(vllm_config: VllmConfig) -> Iterator[str]:
    # This module imports the platform, which imports the current module.
    from vllm_gaudi_spec.upstream.worker import validate_worker_profiler_config

    try:
        validate_worker_profiler_config(vllm_config.profiler_config)
    except ValueError as error:
        yield f"{str(error).rstrip('.')}; leave out --profiler-config."


def _kv_dtype_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    cache, name = vllm_config.cache_config, backend.traits.name
    if cache.cache_dtype == "auto":
        return
    if backend.weights.fp8_arithmetic is None:
        yield f"KV is kept in the model's dtype on {name}, got {cache.cache_dtype}; use --kv-cache-dtype auto."
    elif cache.cache_dtype != FP8_KV:
        yield (
            f"KV is kept in the model's dtype or in FP8 (e4m3), got {cache.cache_dtype}; use --kv-cache-dtype auto or "
            "fp8."
        )
    if cache.kv_cache_dtype_skip_layers:
        yield "All layers keep KV in one dtype; leave out --kv-cache-dtype-skip-layers."
    if (config := target_config()) is not None and config.measures:
        remedy = suggest_model_dtype(vllm_config)
        yield f"QUANT_CONFIG measures KV in the model's dtype; {remedy} while measuring."


# Maps vllm-ascend's options for speculation to the option to set on this platform instead.
_VLLM_ASCEND_OPTIONS = {
    "rejection_sampler_config": ", or set rejection_sample_method in --speculative-config to block",
    "dynamic_spec_config": ", or set enable_adaptive_verification in --speculative-config",
}


# vLLM's options for LoRA adapters that our layers do not use.
_USELESS_LORA_OPTIONS = (
    "default_mm_loras",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
    "enable_tower_connector_lora",
    "fully_sharded_loras",
    "max_lora_cls_labels",
    "specialize_active_lora",
)


def _is_dequantized(vllm_config: VllmConfig, model: ModelConfig, backend: DeviceBackend) -> bool:
    """Whether a model's weights are dequantized while loading, so its layers are those of an unquantized model."""
    requested = Options.from_vllm(vllm_config).weight_kernels
    return model.quantization == DEQUANTIZED and not is_native(
        format_of(model), model.dtype, requested, backend.weights
    )


def adapter_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    lora, model = vllm_config.lora_config, vllm_config.model_config
    if lora is None or model is not get_target_config(vllm_config):
        return  # drafters never have adapters
    if model.is_moe:
        yield f"{model.model} has experts, for which LoRA adapters are not supported yet; leave out --enable-lora."
    if model.use_mla:
        yield f"{model.model} has latent attention (MLA), for which LoRA is not supported yet; leave out --enable-lora."
    if model.quantization is not None and not _is_dequantized(vllm_config, model, backend):
        name = f"weight_kernels in additional_config.{ADDITIONAL_CONFIG_KEY}"
        yield (
            f"{model.model} has quantized weights ({model.quantization}) in native kernels, for which LoRA adapters "
            f"are not supported yet; set {name} to {REFERENCE}, or leave out --enable-lora."
        )
    if target_config() is not None:
        yield "LoRA adapters are not supported with QUANT_CONFIG; unset it, or leave out --enable-lora."
    if str(lora.lora_dtype).removeprefix("torch.") not in ("auto", "None", str(model.dtype).removeprefix("torch.")):
        yield f"LoRA adapters are computed in the model's dtype, {model.dtype}; leave out --lora-dtype."
    for name in _USELESS_LORA_OPTIONS:
        if getattr(lora, name) not in (None, False):
            yield f"{name} of LoRA adapters is not supported; leave out --{name.replace('_', '-')}."

"""Checks that reject unsupported models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.config import FP8_KV, ranks_in_step
from vllm_gaudi_spec.methods import has_model
from vllm_gaudi_spec.quantization.config import target_config
from vllm_gaudi_spec.recurrent.table import SERVED as RECURRENT
from vllm_gaudi_spec.recurrent.table import has_states

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend, DeviceTraits


_SEEN_BOTH_WAYS = ("gemma3", "gemma4")
"""`model_type` of each model that attends bidirectionally within images and was compared with transformers."""


_POOLING_WITH_STATES = ("ColBERTLfm2Model", "JambaForSequenceClassification")
"""Pooling models with recurrent layers that were compared with transformers."""
_MEDIA_WITH_STATES = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
"""Models with images and recurrent layers that were compared with transformers."""


def list_models(vllm_config: VllmConfig) -> list[tuple[ModelConfig, str]]:
    """Return the target and, if the drafter is a model, the drafter, each with its --load-format."""
    spec_config, load = vllm_config.speculative_config, vllm_config.load_config
    models = [(vllm_config.model_config, str(load.load_format))]
    if spec_config is not None and has_model(spec_config.method):
        models.append((spec_config.draft_model_config, str((spec_config.draft_load_config or load).load_format)))
    return models


def model_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    for model, _ in list_models(vllm_config):
        yield from _single_model_refusals(model)
        yield from _graph_refusals(model, backend.traits)
    yield from _selection_refusals(vllm_config, backend)
    if has_states(vllm_config.model_config):
        yield from _state_refusals(vllm_config, backend)
    if vllm_config.model_config.supports_multimodal_inputs:
        for reason in _multimodal_refusals(vllm_config, backend):
            yield f"{reason}; add --language-model-only to serve only the text of {vllm_config.model_config.model}."
    if vllm_config.model_config.runner_type == "pooling":
        yield from _pooling_refusals(vllm_config, backend)


def _graph_refusals(model: ModelConfig, traits: DeviceTraits) -> Iterator[str]:
    """Yield reasons to reject models with layers that the device cannot capture."""
    if traits.updates_views:
        return
    graphs = f"which graphs of {traits.name} in mode {traits.mode} do not support"
    if model.is_deepseek_mla and not model.use_mla:
        yield (
            f"{model.model} ({model.architecture}) without latent attention has layers that change tensors through "
            f"views, {graphs}; leave VLLM_MLA_DISABLE unset, or set PT_HPU_LAZY_MODE=0."
        )
    if model.using_transformers_backend() and model.is_moe:
        yield (
            f"{model.model} ({model.architecture}) has experts of vLLM's transformers backend, whose operator changes "
            f"a view, {graphs}; set PT_HPU_LAZY_MODE=0."
        )


def _single_model_refusals(model: ModelConfig) -> Iterator[str]:
    """Yield reasons to reject a single model, which may be a target or a drafter."""
    if any(name in _EMBEDDINGS_ONLY for name in model.architectures):
        yield (
            f"vLLM's {model.architecture} takes embeddings in place of tokens, which is not supported; use another "
            "model."
        )
    if model.supports_multimodal_inputs and model.runner_type == "draft":
        yield f"Drafter {model.model} takes images, audio or video; use a text-only model."
    if has_states(model) and model.runner_type == "draft":
        yield f"Drafter {model.model} keeps recurrent state, which only targets can; use one with attention only."
    if has_states(model) and not any(name in RECURRENT for name in model.architectures):
        yield (
            f"{model.model} keeps recurrent state of a kind that is not supported yet ({model.architecture}); use a "
            f"model with attention only, or one of {', '.join(RECURRENT)}."
        )
    if _has_other_slopes(model):
        yield (
            f"{model.model} uses a form of ALiBi other than that of BLOOM and Falcon, which is not supported; use a "
            "model with rotary embeddings."
        )
    if any(name in _SINK_KEYS for name in model.architectures):
        yield f"{model.model} has attention sinks with keys, which are not supported; use a model without them."
    yield from _gate_refusals(model)
    yield from _kimi_refusals(model)
    if model.is_encoder_decoder:
        yield f"{model.model} is an encoder-decoder model; use a decoder-only one."
    if hasattr(model.hf_text_config, "index_topk") and not _selects_keys(model):
        yield (
            f"{model.model} selects keys with an indexer (index_topk), which is supported only for vLLM's "
            f"{', '.join(_SPARSE)}; use one of these, with --model-impl auto and without VLLM_MLA_DISABLE."
        )


def _selection_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    """Yield reasons to reject options for models with key selection, which store indexer keys next to latent keys."""
    model = vllm_config.model_config
    if not hasattr(model.hf_text_config, "index_topk"):
        return
    if not backend.traits.selects_keys:
        yield (
            f"{model.model} selects keys with an indexer, which was not compared on {backend.traits.name} yet; set "
            "VGS_DEVICE=cpu."
        )
    if vllm_config.cache_config.cache_dtype == FP8_KV:
        yield f"{model.model} keeps keys of an indexer, for which FP8 has no scale; use --kv-cache-dtype auto."
    if target_config() is not None:
        yield f"{model.model} selects keys with an indexer, for which QUANT_CONFIG is not supported yet; unset it."


def _multimodal_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    model = vllm_config.model_config
    media = model.get_multimodal_config()
    traits = backend.traits
    compared = traits.media_models
    if traits.captures and not compared:
        yield f"Images, audio and video are not served on {traits.name} in mode {traits.mode} yet"
    elif traits.captures and not any(name in compared for name in model.architectures):
        served = ", ".join(compared)
        yield f"Images, audio and video are served on {traits.name} in mode {traits.mode} for {served} only"
    elif traits.captures and _keeps_image_sizes(model):
        yield f"Images of {model.model} keep their sizes (Pixtral), each of which {traits.name} would compile"
    if traits.captures and vllm_config.parallel_config.tensor_parallel_size > 1:
        yield f"Images, audio and video are not supported on {traits.name} with --tensor-parallel-size yet"
    has_windows = getattr(model.hf_text_config, "use_bidirectional_attention", None) == "vision"
    sees_both_ways = model.is_mm_prefix_lm or has_windows
    if has_windows and model.disable_sliding_window:
        yield "--disable-sliding-window leaves no layer that sees images in both directions"
    window = model.hf_text_config.sliding_window if has_windows else None
    if window is not None and _max_image_tokens(media) > window:
        yield (
            "max_soft_tokens in --mm-processor-kwargs allows images longer than the sliding window of "
            f"{window} tokens, which would be seen in one direction"
        )
    if sees_both_ways and model.hf_config.model_type not in _SEEN_BOTH_WAYS:
        yield f"Bidirectional attention within images is supported only for {', '.join(_SEEN_BOTH_WAYS)}"
    if any(name in _TEXT_ONLY for name in model.architectures):
        yield f"Images, audio and video of {model.architecture} are not supported yet"
    if model.is_multimodal_raw_input_only_model:
        yield "A model that takes media without tokens is not supported"
    if model.runner_type == "pooling":
        yield "Images, audio and video are not supported for pooling models yet"
    if model.is_hybrid and not any(name in _MEDIA_WITH_STATES for name in model.architectures):
        yield "Images, audio and video together with recurrent layers are not supported yet"
    if vllm_config.parallel_config.data_parallel_size > 1:
        yield "Images, audio and video are not supported with --data-parallel-size yet"
    if media.is_multimodal_pruning_enabled():
        yield "--video-pruning-rate is not supported"
    if media.mm_encoder_only:
        yield "--mm-encoder-only is not supported"
    if target_config() is not None:
        yield "QUANT_CONFIG is not supported together with images, audio and video yet"
    if media.enable_mm_embeds:
        yield "--enable-mm-embeds is not supported"
    if vllm_config.lora_config is not None:
        yield "LoRA adapters are not supported together with images, audio and video yet"


def _max_image_tokens(media: Any) -> int:
    """Return the maximum number of tokens per image if the user has set it, and 0 otherwise.

    The processor's default maximum is smaller than a sliding window.
    """
    options = media.mm_processor_kwargs or {}
    return int(options.get("max_soft_tokens") or options.get("images_kwargs", {}).get("max_soft_tokens") or 0)


def _keeps_image_sizes(model: ModelConfig) -> bool:
    """Whether each image size results in a different encoder shape, as with the Pixtral encoder in the Llava class."""
    vision = getattr(model.hf_config, "vision_config", None)
    return "LlavaForConditionalGeneration" in model.architectures and getattr(vision, "model_type", "") == "pixtral"


def _whole_prompt_refusals(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield reasons to reject options that would split a prompt with bidirectional attention or block it forever."""
    name, scheduler = vllm_config.model_config.model, vllm_config.scheduler_config
    if scheduler.long_prefill_token_threshold:
        yield f"{name} computes a prompt in one step; leave out --long-prefill-token-threshold."
    longest = vllm_config.model_config.max_model_len
    if (scheduler.max_num_scheduled_tokens or longest) < longest:
        yield f"{name} computes a prompt in one step; leave out --max-num-scheduled-tokens."
    if scheduler.max_num_batched_tokens < longest:
        yield (
            f"{name} computes a prompt in one step; set --max-num-batched-tokens to {longest} or more, or lower "
            "--max-model-len."
        )


def _pooling_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    model = vllm_config.model_config
    if model.attn_type not in ("decoder", "encoder_only") and model.architecture not in _POOLING_WITH_STATES:
        yield (
            f"{model.model} is a pooling model of the type {model.attn_type}, which is not supported; use one with "
            "attention alone, such as Qwen3-Embedding."
        )
    if backend.traits.captures:
        yield f"Pooling models are not served on {backend.traits.name} yet; set VGS_DEVICE=cpu."
    if model.attn_type == "encoder_only":
        yield from _whole_prompt_refusals(vllm_config)
    if vllm_config.speculative_config is not None:
        yield "A pooling model generates no tokens to draft; leave out --speculative-config."
    if vllm_config.lora_config is not None:
        yield "LoRA adapters are not supported for pooling models yet; leave out --enable-lora."
    if target_config() is not None:
        yield "QUANT_CONFIG is not supported for pooling models yet; unset it."
    if ranks_in_step(vllm_config) > 1:
        yield "Pooling models whose experts data-parallel ranks share are not supported; use --data-parallel-size 1."


def _state_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    """Yield reasons to reject options for targets with recurrent layers."""
    name, cache = vllm_config.model_config.model, vllm_config.cache_config
    traits, model = backend.traits, vllm_config.model_config
    compared = traits.recurrent_models
    if traits.captures and not any(one in compared for one in model.architectures):
        only = f" (only those of {', '.join(compared)})" if compared else ""
        yield (
            f"{name} has recurrent layers, which were not compared on {traits.name} in mode {traits.mode} yet{only}; "
            "set VGS_DEVICE=cpu."
        )
    scheduler = vllm_config.scheduler_config
    if model.is_attention_free and scheduler.max_num_batched_tokens < model.max_model_len:
        yield (
            f"{name} has no KV, and vLLM computes the prompts of such models in one step; set --max-num-batched-tokens "
            f"to {model.max_model_len} or more, or lower --max-model-len."
        )
    if vllm_config.lora_config is not None:
        yield f"{name} has recurrent layers, for which LoRA adapters are not supported yet; leave out --enable-lora."
    if target_config() is not None:
        yield f"{name} has recurrent layers, for which QUANT_CONFIG is not supported yet; unset it."
    if cache.use_replayssm:
        yield "Recurrent layers are computed without the kernels of ReplaySSM; leave out --use-replayssm."


# vLLM classes that accept only embeddings, even for text.
_EMBEDDINGS_ONLY = ("VoxtralRealtimeGeneration",)
# vLLM classes that are supported for text, but whose image and audio inputs were not compared with transformers.
_TEXT_ONLY = ("Gemma3nForConditionalGeneration",)
# vLLM classes that pass ALiBi slopes to their layers.
_SLOPES = ("BloomForCausalLM", "FalconForCausalLM")
# vLLM classes that use ALiBi with the square root of distances, for which `uses_alibi` is False.
_ROOT_SLOPES = ("Step1ForCausalLM",)
# vLLM classes with DeepSeek-V3.2's indexer, and the class of their MTP layers, compared with transformers.
_SPARSE = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32MTPModel")
_SINK_KEYS = ("PanguProMoEV2ForCausalLM",)


def _selects_keys(model: ModelConfig) -> bool:
    """Whether latent attention reads only the keys that the model's indexer selects."""
    served = any(name in _SPARSE for name in model.architectures)
    return served and model.use_mla and not model.using_transformers_backend()


def _has_other_slopes(model: ModelConfig) -> bool:
    """Whether the model uses a variant of ALiBi that our attention does not support."""
    if any(name in _ROOT_SLOPES for name in model.architectures):
        return True
    return model.uses_alibi and not any(name in _SLOPES for name in model.architectures)


_GPT_OSS_GATE = dict(swiglu_alpha=1.702, swiglu_limit=7.0)
"""Constants in vLLM's gpt-oss class, which ignores the values in the configuration."""


def _gate_refusals(model: ModelConfig) -> Iterator[str]:
    if "GptOssForCausalLM" not in model.architectures:
        return
    for name, fixed in _GPT_OSS_GATE.items():
        if (found := getattr(model.hf_text_config, name, fixed)) != fixed:
            yield f"{model.model} has {name} {found}, but vLLM's experts have {fixed}; use another model."


def _kimi_refusals(model: ModelConfig) -> Iterator[str]:
    """Yield reasons to reject Kimi K3, whose configuration vLLM treats like that of Kimi Linear."""
    if "KimiLinearForCausalLM" not in model.architectures:
        return
    config = model.hf_text_config
    parts = config.linear_attn_config or {}
    found = [name for name in ("use_full_rank_gate", "gate_lower_bound") if parts.get(name)]
    if found or config.attn_res_block_size is not None:
        yield (
            f"{model.model} has {(found or ['attn_res_block_size'])[0]}, like Kimi K3, which is not supported; "
            "use Kimi Linear."
        )


def expert_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    """Yield reasons to reject options for models whose experts are shared by data-parallel ranks."""
    parallel = vllm_config.parallel_config
    if ranks_in_step(vllm_config) == 1:
        return
    name = vllm_config.model_config.model
    if not parallel.enable_expert_parallel:
        yield f"{name} has experts, which data-parallel ranks have to share; add --enable-expert-parallel."
    if parallel.all2all_backend != _ALL2ALL:
        yield f"--all2all-backend {parallel.all2all_backend} is not supported; use {_ALL2ALL}, which is the default."
    spec_config = vllm_config.speculative_config
    if spec_config is not None and has_model(spec_config.method) and spec_config.draft_model_config.is_moe:
        yield (
            f"{spec_config.draft_model_config.model} is a drafter with experts, which does not support data "
            "parallelism; use --data-parallel-size 1, or a drafter without experts in --speculative-config."
        )


_ALL2ALL = "allgather_reducescatter"

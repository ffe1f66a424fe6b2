"""What would not work is refused: at start-up or with the request, in one line that names the option to change."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from safetensors import SafetensorError, safe_open
from vllm import envs

from vllm_gaudi_spec.config import (
    ADDITIONAL_CONFIG_KEY,
    EAGLE,
    EAGLE3,
    HEAD_METHODS,
    MAX_DRAFTS,
    MEDUSA,
    METHODS,
    MOST_RULES,
    MTP,
    REQUEST_OPTION,
    RETOKENIZE,
    SLEM,
    TLI,
    UNIVERSAL_DRAFT,
    WEIGHTLESS_METHODS,
    Options,
    Speculation,
    UnsupportedConfigError,
    pickled_weights,
    ranks_in_step,
    shown,
)
from vllm_gaudi_spec.quantization.config import drafter_config, hostile_scales, missing_scales, target_config

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig
    from vllm.sampling_params import SamplingParams

    from vllm_gaudi_spec.backends.base import DeviceBackend
    from vllm_gaudi_spec.quantization.config import QuantConfig


def refuse_unsupported(vllm_config: VllmConfig, backend: DeviceBackend) -> None:
    """Raise at start-up, with the option to change, for every combination that would not work later."""
    if vllm_config.model_config is None:
        return
    for refusals in (_pickle_refusals, _model_refusals, _feature_refusals, _speculation_refusals):
        for reason in refusals(vllm_config):
            raise UnsupportedConfigError(reason)
    for of_device in (
        _damage_refusals,
        _expert_refusals,
        _format_refusals,
        _weight_refusals,
        _quantization_refusals,
        _adapter_refusals,
    ):
        for reason in of_device(vllm_config, backend):
            raise UnsupportedConfigError(reason)


# As vLLM's loader looks for them, and others of the kind.
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Formats of --load-format that are pickles, or that fall back to them.
_PICKLE_FORMATS = ("pt", "npcache")
_FALLING_BACK = ("auto", "hf")


def _pickle_refusals(vllm_config: VllmConfig) -> Iterator[str]:
    """What the loader would refuse as well (`compat.refuse_pickled_weights`), but in the engine and later."""
    for model, load_format in _models(vllm_config):
        if load_format in _PICKLE_FORMATS:
            yield f"Load format {load_format} reads pickles; give models with *.safetensors, and leave it out."
        folder = Path(model.model)
        if load_format not in _FALLING_BACK or not folder.is_dir() or any(folder.glob("*.safetensors")):
            continue
        if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
            yield pickled_weights(model.model, pickles[0])


def _model_refusals(vllm_config: VllmConfig) -> Iterator[str]:
    model = vllm_config.model_config
    if model.runner_type not in ("generate", "draft"):
        yield f"{model.model} is run as a {model.runner_type} model; use --runner generate."
    if model.is_multimodal_model:
        yield f"{model.model} takes images, audio or video; use a text-only model."
    if model.is_hybrid or model.has_inner_state:
        yield f"{model.model} keeps recurrent state; use a model with attention only."
    if model.is_encoder_decoder:
        yield f"{model.model} is an encoder-decoder model; use a decoder-only one."
    if model.use_mla and hasattr(model.hf_text_config, "index_topk"):
        yield f"{model.model} uses sparse MLA attention, which is not supported yet; use a model without it."


def _expert_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    """Of models with experts that data-parallel ranks share."""
    parallel = vllm_config.parallel_config
    if ranks_in_step(vllm_config) == 1:
        return
    name = vllm_config.model_config.model
    if not parallel.enable_expert_parallel:
        yield f"{name} has experts, which data-parallel ranks have to share; add --enable-expert-parallel."
    if backend.captures:
        yield (
            f"{name} has experts, and such models run data parallel on the CPU only, not on {backend.name}; use "
            "--tensor-parallel-size with --enable-expert-parallel in place of --data-parallel-size."
        )
    if parallel.all2all_backend != _ALL2ALL:
        yield f"--all2all-backend {parallel.all2all_backend} is not supported; use {_ALL2ALL}, which is the default."
    given = vllm_config.speculative_config
    if given is not None and given.method not in WEIGHTLESS_METHODS and given.draft_model_config.is_moe:
        yield (
            f"A drafter with experts does not run data parallel: {given.draft_model_config.model}; use "
            "--data-parallel-size 1, or a drafter without experts in --speculative-config."
        )


_ALL2ALL = "allgather_reducescatter"


def _feature_refusals(vllm_config: VllmConfig) -> Iterator[str]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        yield "Pipeline parallelism is not supported; use --pipeline-parallel-size 1."
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "Context parallelism is not supported; use 1 for the decode and prefill context parallel sizes."
    if parallel.use_ray and not envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND:
        yield "vLLM's older executor for Ray is not supported; unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND."
    if parallel.enable_dbo:
        yield "Dual-batch overlap is not supported; leave out --enable-dbo."
    if vllm_config.kv_transfer_config is not None:
        yield "KV transfer is not supported; leave out --kv-transfer-config."
    if model.enable_prompt_embeds:
        yield "Prompt embeddings are not supported; leave out --enable-prompt-embeds."
    if vllm_config.cache_config.cache_dtype != "auto":
        yield "The KV cache has the model's dtype, or that of QUANT_CONFIG; use --kv-cache-dtype auto."
    if vllm_config.attention_config.backend is not None:
        yield "The platform brings its own attention; leave out --attention-backend."
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        yield "Fast prefill with shared KV is not supported; leave out --kv-sharing-fast-prefill."
    if vllm_config.ec_transfer_config is not None:
        yield "Encoder cache transfer is not supported; leave out --ec-transfer-config."
    if vllm_config.weight_transfer_config is not None:
        yield "Weight transfer is not supported; leave out --weight-transfer-config."
    if vllm_config.profiler_config.profiler is not None:
        yield "Profiling through the server is not supported; leave out --profiler-config."
    if vllm_config.watermark_config is not None:
        yield "Watermarking is not supported; leave its configuration out."
    if model.return_sampling_mask:
        yield "Sampling masks are not reported; leave out --return-sampling-mask."
    if model.enable_trace_replay:
        yield "Trace replay is not supported; leave out --enable-trace-replay."
    for name, instead in _OTHERS_ADDITIONAL_CONFIG.items():
        if name in (vllm_config.additional_config or {}):
            yield f"additional_config.{name} is vllm-ascend's and is not read here; leave it out{instead}."


# What decides how vllm-ascend speculates, and what serves here instead.
_OTHERS_ADDITIONAL_CONFIG = {
    "rejection_sampler_config": ", or set rejection_sample_method in --speculative-config to block",
    "dynamic_spec_config": f", or set adaptive in additional_config.{ADDITIONAL_CONFIG_KEY}",
}


def _models(vllm_config: VllmConfig) -> list[tuple[ModelConfig, str]]:
    """The target and the drafter, and the --load-format of each."""
    given, load = vllm_config.speculative_config, vllm_config.load_config
    models = [(vllm_config.model_config, str(load.load_format))]
    if given is not None and given.method not in WEIGHTLESS_METHODS:
        models.append((given.draft_model_config, str((given.draft_load_config or load).load_format)))
    return models


_CONSOLIDATED = "consolidated*.safetensors"
# Formats of --load-format in which vLLM's loader reads files and an index of one kind; auto is one of them.
_SAFETENSORS_FORMATS = ("hf", "safetensors", "fastsafetensors", "instanttensor")


def weight_files(folder: Path, load_format: str) -> tuple[str, str] | None:
    """As the loader has it: the files that it reads, and the index that says which of them; None if it reads none."""
    if load_format == "auto":
        load_format = "mistral" if any(folder.glob(_CONSOLIDATED)) else "hf"
    if load_format == "mistral":
        return _CONSOLIDATED, "consolidated.safetensors.index.json"
    return ("*.safetensors", "model.safetensors.index.json") if load_format in _SAFETENSORS_FORMATS else None


def _damage_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    """Weights that were only half written. The loader would find it, minutes later and in another process."""
    for folder, load_format in {(Path(model.model), load_format) for model, load_format in _models(vllm_config)}:
        if (read := weight_files(folder, load_format)) is None:
            continue
        files, index = read[0], folder / read[1]
        for file in sorted(folder.glob(files)):
            try:
                with safe_open(file, "np"):
                    pass  # it compares the header with the file's length
            except (OSError, SafetensorError) as error:
                yield f"{file} is damaged or was only half written ({error}); copy the model again or name another."
        if index.is_file() and (missing := _missing_parts(index)):
            yield f"{index} names {missing}, which can not be had; copy the model again or name another."


def _missing_parts(index: Path) -> str | None:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        return next((name for name in sorted(names) if not (index.parent / name).is_file()), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "no weights"


def _format_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    for model, _ in _models(vllm_config):
        if backend.takes_weight_formats or model.quantization is None:
            continue
        yield (
            f"{model.model} has weights in a format of its own ({model.quantization}), for which there are no kernels "
            f"yet on {backend.name}; use a model in bfloat16 or float16."
        )


def _weight_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    wanted, model = Options.from_vllm(vllm_config).cpu_weights, vllm_config.model_config
    name = f"additional_config.{ADDITIONAL_CONFIG_KEY}.cpu_weights"
    given = vllm_config.speculative_config
    if wanted is None or (given is not None and model is not given.target_model_config):
        return  # a drafter's weights may have a format of their own
    if backend.name != "cpu":
        yield f"{name} is for device cpu, and this is {backend.name}; leave it out."
    if str(model.dtype) != "torch.float32":
        yield f"{name} is for models that run in float32; leave it out, or use --dtype float32."
    if model.quantization is not None:
        yield f"{model.model} has weights in a format of its own ({model.quantization}); leave {name} out."


def _quantization_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    options, given, model = Options.from_vllm(vllm_config), vllm_config.speculative_config, vllm_config.model_config
    if given is not None and model is not given.target_model_config:
        return  # the drafter's part of a configuration that was looked at as a whole
    quantized = [] if (target := target_config()) is None else [(target, model)]
    if (drafter := drafter_config(options)) is not None:
        if given is None or given.method in WEIGHTLESS_METHODS:
            yield f"{drafter.option} is for drafters that are models; leave it out."
            return
        quantized.append((drafter, given.draft_model_config))
    if not quantized and options.fp8_range is not None:
        yield f"additional_config.{ADDITIONAL_CONFIG_KEY}.fp8_range is for QUANT_CONFIG; leave it out."
    if target is not None and options.cpu_weights is not None:
        name = f"additional_config.{ADDITIONAL_CONFIG_KEY}.cpu_weights"
        yield f"QUANT_CONFIG brings a format of its own; leave {name} out."
    for config, of_model in quantized:
        yield from _quantized_model_refusals(config, of_model, backend)
        if vllm_config.parallel_config.data_parallel_size > 1:
            yield f"{config.option} does not run data parallel; use --data-parallel-size 1, or unset it."
        if backend.name == "hpu":
            yield from hostile_scales(config)
        elif not config.measures:
            parallel = vllm_config.parallel_config
            if given is not None and of_model is given.draft_model_config:
                parallel = given.draft_parallel_config
            yield from missing_scales(config, parallel.tensor_parallel_size)


def _quantized_model_refusals(config: QuantConfig, model: ModelConfig, backend: DeviceBackend) -> Iterator[str]:
    if not backend.takes_quant_config:
        yield f"{config.option} is for a Gaudi, the emulated one, and the CPU, and this is {backend.name}; unset it."
    elif backend.name != "hpu":
        yield from config.not_simulated()
    if model.use_mla:
        yield f"{model.model} has latent attention (MLA), which {config.option} does not serve yet; unset it."
    if model.is_moe:
        yield f"{model.model} has experts, which {config.option} does not serve yet; unset it."
    if model.quantization is not None:
        yield f"{model.model} has weights in a format of its own ({model.quantization}); unset {config.option}."


# Of vLLM's options for LoRA adapters, those that nothing here listens to.
_USELESS_LORA_OPTIONS = (
    "default_mm_loras",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
    "enable_tower_connector_lora",
    "fully_sharded_loras",
    "max_lora_cls_labels",
    "specialize_active_lora",
)


def _adapter_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    lora, given, model = vllm_config.lora_config, vllm_config.speculative_config, vllm_config.model_config
    if lora is None or (given is not None and model is not given.target_model_config):
        return  # a drafter never has adapters
    if model.is_moe:
        yield f"{model.model} has experts, for which LoRA adapters are not supported yet; leave out --enable-lora."
    if model.use_mla:
        yield f"{model.model} has latent attention (MLA), for which LoRA is not supported yet; leave out --enable-lora."
    if model.quantization is not None:
        yield (
            f"{model.model} has weights in a format of its own ({model.quantization}), for which LoRA adapters are not "
            "supported yet; leave out --enable-lora."
        )
    if target_config() is not None:
        yield "LoRA adapters do not work with QUANT_CONFIG; unset it, or leave out --enable-lora."
    if str(lora.lora_dtype).removeprefix("torch.") not in ("auto", "None", str(model.dtype).removeprefix("torch.")):
        yield f"LoRA adapters are computed in the model's dtype, {model.dtype}; leave out --lora-dtype."
    for name in _USELESS_LORA_OPTIONS:
        if getattr(lora, name) not in (None, False):
            yield f"{name} of LoRA adapters is not supported; leave out --{name.replace('_', '-')}."


# What nothing here listens to, whatever the method, and why where there is more to say.
_NO_EFFECT = {
    "disable_padded_drafter_batch": ", since all rows of a batch draft in one shape",
    "enable_adaptive_verification": "",
    "parallel_drafting": "",
    "use_local_argmax_reduction": "",
}
# What says how a drafter's model is loaded and run.
_DRAFTER_MODEL_OPTIONS = (
    "attention_backend",
    "code_revision",
    "disable_eagle_block_drop",
    "draft_load_config",
    "draft_tensor_parallel_size",
    "dspark_draft_topk",
    "enforce_eager",
    "kv_cache_dtype",
    "moe_backend",
    "quantization",
    "revision",
)
# Of these, what the platform's own layers do not listen to.
_DRAFTER_LAYER_OPTIONS = (
    "attention_backend",
    "disable_eagle_block_drop",
    "dspark_draft_topk",
    "kv_cache_dtype",
    "moe_backend",
)
_NGRAM_OPTIONS = ("prompt_lookup_max", "prompt_lookup_min")
_SUFFIX_OPTIONS = "suffix_decoding_"


def _speculation_refusals(vllm_config: VllmConfig) -> Iterator[str]:
    given = vllm_config.speculative_config
    yield from _pacing_refusals(vllm_config)
    if given is None:
        yield from _useless_universal_options(vllm_config, "no speculation")
        return
    if given.method not in METHODS:
        yield (
            f"Speculative method {given.method} is not supported yet; "
            f"use one of {', '.join(METHODS)} in --speculative-config."
        )
    if given.num_speculative_tokens > MAX_DRAFTS:
        yield (
            f"{given.num_speculative_tokens} drafts a step are too many; "
            f"set num_speculative_tokens in --speculative-config to {MAX_DRAFTS} or less."
        )
    longest = given.target_model_config.max_model_len
    if given.max_model_len is not None and given.max_model_len > longest:
        yield (
            f"max_model_len {given.max_model_len} in --speculative-config is more than the target's {longest}; "
            "use less, or leave it out."
        )
    for name in _set_options(given, _NO_EFFECT):
        yield f"{name} is not supported{_NO_EFFECT[name]}; leave it out of --speculative-config."
    yield from _universal_refusals(vllm_config)
    if given.method in WEIGHTLESS_METHODS:
        yield from _weightless_refusals(given)
    elif given.method in METHODS:
        yield from _drafter_model_refusals(given)
    if brings_logits_processors(vllm_config.model_config):
        yield (
            "Custom logits processors do not work with speculative decoding; leave out --logits-processors and "
            "uninstall the packages that bring some, or leave out --speculative-config."
        )


def _pacing_refusals(vllm_config: VllmConfig) -> Iterator[str]:
    if not Options.from_vllm(vllm_config).paces:
        return
    options = f"adaptive and goodput in additional_config.{ADDITIONAL_CONFIG_KEY}"
    theirs = vllm_config.scheduler_config.scheduler_cls
    if vllm_config.speculative_config is None:
        yield f"{options} have no effect without speculation; leave them out, or give a --speculative-config."
    elif theirs is not None and not str(theirs).startswith(__package__):
        yield f"{options} need a scheduler of their own; leave them out, or leave out --scheduler-cls."


def _universal_refusals(vllm_config: VllmConfig) -> Iterator[str]:
    speculation, options = Speculation.from_vllm(vllm_config), Options.from_vllm(vllm_config)
    assert speculation is not None
    if not speculation.universal:
        yield from _useless_universal_options(vllm_config, f"method {speculation.method}")
        return
    if speculation.universal_match == SLEM and not speculation.retokenizes:
        yield (
            f"universal_match {SLEM} drafts in the drafter's own tokens, so the drafter has to read them too; "
            f"set universal_context in additional_config.{ADDITIONAL_CONFIG_KEY} to {RETOKENIZE}."
        )
    if speculation.universal_match == SLEM and speculation.drafting != "greedy":
        yield (
            f"universal_match {SLEM} verifies drafts as greedy ones; leave draft_sample_method and "
            f"rejection_sample_method out of --speculative-config, or use universal_match {TLI}."
        )
    if options.universal_slab is not None and not speculation.retokenizes:
        yield f"universal_slab is for universal_context {RETOKENIZE}; leave it out."


def _useless_universal_options(vllm_config: VllmConfig, used: str) -> Iterator[str]:
    options = Options.from_vllm(vllm_config)
    for name in ("universal_context", "universal_match", "universal_slab"):
        if getattr(options, name) is not None:
            yield (
                f"additional_config.{ADDITIONAL_CONFIG_KEY}.{name} has no effect with {used}; leave it out, or use "
                f"method {UNIVERSAL_DRAFT} in --speculative-config."
            )


def _weightless_refusals(given: SpeculativeConfig) -> Iterator[str]:
    method = given.method
    if given.draft_sample_method != "greedy":
        yield (
            f"draft_sample_method {given.draft_sample_method} needs a drafter that is a model, and method {method} has "
            "none; use greedy in --speculative-config."
        )
    if given.rejection_sample_method == "probabilistic":
        yield (
            f"rejection_sample_method probabilistic needs a drafter that is a model, and method {method} has none; "
            "use strict, standard or block in --speculative-config."
        )
    useless = list(_set_options(given, _DRAFTER_MODEL_OPTIONS))
    useless += _set_options(given, _NGRAM_OPTIONS) if method == "suffix" else _changed_suffix_options(given)
    if method != "custom_class" and given.model not in (None, method, f"[{method}]"):
        useless.append("model")
    yield from _refuse_useless(given, useless)


def _drafter_model_refusals(given: SpeculativeConfig) -> Iterator[str]:
    own = given.draft_parallel_config.tensor_parallel_size
    target = given.target_parallel_config.tensor_parallel_size
    if own not in (1, target):
        yield f"draft_tensor_parallel_size {own} is neither 1 nor the target's {target}; use one of these."
    if given.rejection_sample_method == "probabilistic" and given.draft_sample_method == "coupled":
        yield (
            "rejection_sample_method probabilistic keeps the drafter's probabilities, draft_sample_method coupled does "
            "not; use strict with coupled in --speculative-config."
        )
    if given.method in (*HEAD_METHODS, MEDUSA):
        yield from _head_refusals(given)
    useless = [*_set_options(given, _DRAFTER_LAYER_OPTIONS), *_set_options(given, _NGRAM_OPTIONS)]
    if given.method in HEAD_METHODS:  # the scheduler listens to it
        useless = [name for name in useless if name != "disable_eagle_block_drop"]
    yield from _refuse_useless(given, [*useless, *_changed_suffix_options(given)])


def _head_refusals(given: SpeculativeConfig) -> Iterator[str]:
    config, target = given.draft_model_config.hf_config, given.target_model_config
    if given.use_gemma4_mtp() or given.use_step3p5_mtp():
        yield f"The MTP layers of {target.model} are not supported yet; use another method in --speculative-config."
    if given.method == MTP and getattr(config, "n_predict", 1) != 1:
        yield (
            f"{target.model} predicts with {config.n_predict} layers one after the other; only models with one such "
            "layer are supported, which is run again for each draft. Use another method in --speculative-config."
        )
    if given.method == MEDUSA and (most := _num_medusa_heads(given)) < given.num_speculative_tokens:
        yield f"{given.model} has {most} heads; set num_speculative_tokens in --speculative-config to that or less."
    wanted = given.draft_model_config.get_hidden_size()
    if given.method == EAGLE3:
        wanted = getattr(config, "target_hidden_size", None) or wanted
    if wanted != target.get_hidden_size():
        yield (
            f"{given.model} reads hidden states of size {wanted}, and those of {target.model} have "
            f"{target.get_hidden_size()}; give a head that was trained for this model in --speculative-config."
        )
    own, theirs = given.draft_model_config.get_vocab_size(), target.get_vocab_size()
    if given.method in (EAGLE, EAGLE3) and own != theirs:
        yield (
            f"{given.model} reads {own} tokens, and {target.model} has {theirs}; give a head that was trained for this "
            "model in --speculative-config."
        )


def _num_medusa_heads(given: SpeculativeConfig) -> int:
    """As its file says: vLLM's own configuration has as many heads as there are to be drafts."""
    from transformers import PretrainedConfig

    written, _ = PretrainedConfig.get_config_dict(given.model, revision=given.revision)
    return next((int(value) for name, value in written.items() if "num" in name and "heads" in name), MAX_DRAFTS)


def _refuse_useless(given: SpeculativeConfig, names: list[str]) -> Iterator[str]:
    for name in names:
        yield f"{name} has no effect with method {given.method}; leave it out of --speculative-config."


def _set_options(given: SpeculativeConfig, names: Iterable[str]) -> Iterator[str]:
    """Those of `names` that the user set: left alone, each is None, False or 0."""
    return (name for name in names if getattr(given, name) not in (None, False, 0))


def _changed_suffix_options(given: SpeculativeConfig) -> Iterator[str]:
    own = (option for option in fields(given) if option.name.startswith(_SUFFIX_OPTIONS))
    return (option.name for option in own if getattr(given, option.name) != option.default)


def brings_logits_processors(model: ModelConfig) -> bool:
    """Whether the user or an installed package adds code of its own to the sampler."""
    from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

    return bool(model.logits_processors or entry_points(group=LOGITSPROCS_GROUP))


# Of a model, its own stop token included.
_MOST_END_TOKENS = 8


def _too_many_rules(params: SamplingParams) -> str | None:
    """vLLM asks before it spells bad words in tokens and adds the model's end tokens: hence the guesses."""
    num_spellings = 2 * len(params.bad_words or ())  # with and without a space before each word
    stops = len(params.stop_token_ids or ()) + _MOST_END_TOKENS if params.min_tokens else 0
    wanted = len(params.logit_bias or {}) + num_spellings + stops
    if wanted <= MOST_RULES:
        return None
    return (
        f"logit_bias, bad_words and stop tokens that min_tokens holds back make up to {wanted} rules; this device has "
        f"room for {MOST_RULES} a request."
    )


def _not_sent(given: Mapping[str, object]) -> str | None:
    """JSON can name halves of characters, and integers of any size. vLLM's front end fails when it sends one to the
    engine, and answers with an error of the server's."""
    for name, value in given.items():
        try:
            msgspec.msgpack.encode(value)
        except UnicodeEncodeError:
            return f"{name} has a lone surrogate (\\ud800 to \\udfff), which is no character; leave it out."
        except OverflowError:
            return f"{name} has an integer of more than 64 bits; use a smaller one."
        except TypeError:
            continue  # an object of Python's own, which no request over HTTP has
    return None


def unsupported_request(params: SamplingParams, *, fixed_tables: bool, cache_salt: str | None = None) -> str | None:
    """Why a request can not be served, or None. `fixed_tables`: the device's programs have room for so many rules."""
    given = {name: value for name in params.__struct_fields__ if (value := getattr(params, name)) is not None}
    if reason := _not_sent(given | {"cache_salt": cache_salt}):
        return reason
    if fixed_tables and (reason := _too_many_rules(params)):
        return reason
    if params.thinking_token_budget is not None:
        return "thinking_token_budget is not supported by this platform; leave it out."
    if params.prompt_logprob_token_ids is not None:
        return "prompt_logprob_token_ids is not supported by this platform; use prompt_logprobs."
    wanted = (params.extra_args or {}).get(REQUEST_OPTION, 0)
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 0:
        return f"{REQUEST_OPTION} in vllm_xargs (extra_args) must be an integer, 0 or more, got {shown(wanted)}."
    return None

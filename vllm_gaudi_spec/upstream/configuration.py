"""Patches to vLLM's configuration: methods, acceptance rules, options, and trust in the code of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from vllm_gaudi_spec.config import (
    IS_UNIVERSAL,
    LM_HEAD_QUANTIZATION,
    SUFFIX_DRAFTS,
    UNIVERSAL_DRAFT,
    UnsupportedConfigError,
    shown,
)
from vllm_gaudi_spec.environment import QUANT_CONFIG, TRUST_DRAFT_CODE
from vllm_gaudi_spec.methods import DRAFT_MODEL, EAGLE3, MEDUSA, METHODS, NGRAM_GPU, RULES, SUFFIX, has_model
from vllm_gaudi_spec.upstream.patching import do_nothing, patches, raise_unchanged, widen, wrap
from vllm_gaudi_spec.upstream.release import FROM_0_33


def describe_drafters() -> None:
    """Change how a speculative configuration describes its drafter. Each part of this patch can be removed separately.

    Treat the method `universal_draft` as a draft model with `use_heterogeneous_vocab`, for every draft sample method
    and for vocabularies of any size.
    Reason: upstream has no such method, allows only greedy drafts if vocabularies differ, and rejects models whose
    output matrices are padded to different sizes. This plugin compares the tokens themselves at start-up.
    Remove when: upstream supports probabilistic drafts with different vocabularies and compares tokens rather than
    sizes.

    Apply `--trust-remote-code` only to the target's folder, and load a drafter with the same name at the target's
    revision.
    Reason: upstream also applies the flag to the drafter, so that trusting one folder runs code from two. It does not
    pass the trusted revision to the drafter.
    Remove when: a speculative configuration has a separate option for trusting the drafter's code.

    Read the method and the number of drafts from a checkpoint in the speculators format unless the user sets them.
    Reason: upstream reads them only if the checkpoint is served on its own. In a speculative configuration, upstream
    guesses the method from the folder name and does not read the number of drafts.
    Remove when: upstream reads both for any drafter.

    Let `suffix` draft at most `SUFFIX_DRAFTS` tokens if the user does not set the number.
    Reason: upstream takes the tree's depth, 24, which this plugin would reject.
    Remove when: a step can verify 24 drafts.

    Describe methods of this plugin that have no model as n-gram drafting, which has no model either.
    Reason: upstream rejects every method that it does not have.
    Remove when: upstream lets a platform add methods.

    Reject Medusa with a one-line error on vLLM 0.33 and later.
    Reason: upstream removed the model's class and configuration, and its error would only list the supported methods.
    Remove when: vLLM 0.32 is no longer supported. Then also remove `drafting/medusa.py` and its table entry.

    If a model has no layers for the method, name the model in the error.
    Reason: even for supported methods such as mtp, upstream reports only "Unsupported speculative method".
    Remove when: upstream's error includes the model's name.

    If the drafter is a LoRA adapter, state in the error that its drafting method, UNO, is not supported.
    Reason: upstream reports only that the folder has no configuration.
    Remove when: upstream has the method (vllm#55947).
    """
    from vllm.config import SpeculativeConfig

    wrap(SpeculativeConfig, "__post_init__", _describe_drafter)
    wrap(SpeculativeConfig, "verify_equal_vocab_size_if_draft_model", do_nothing)


_NO_SUCH_LAYERS = "Unsupported speculative method"


def _describe_with_target(original: Callable[..., Any], config: Any) -> Any:
    try:
        return original(config)
    except NotImplementedError as error:
        model = config.draft_model_config
        if model is None or _NO_SUCH_LAYERS not in str(error):
            raise
        raise UnsupportedConfigError(
            f"Method {config.method} found no layers for drafting in {model.model} ({model.hf_config.model_type}); use "
            "a model that has such layers, or another method in --speculative-config."
        ) from error
    except ValueError as error:
        if config.model is None or not Path(config.model, "adapter_config.json").is_file():
            raise
        raise UnsupportedConfigError(
            f"{config.model} is a LoRA adapter with which a target drafts for itself (method UNO), which is not "
            "supported; use a drafter in --speculative-config."
        ) from error


def _describe_drafter(original: Callable[..., Any], config: Any) -> Any:
    if FROM_0_33 and config.method == MEDUSA:
        raise UnsupportedConfigError(
            f"vLLM removed Medusa in 0.33; set method to {EAGLE3} in --speculative-config and use an EAGLE-3 head, or "
            "use vLLM 0.32."
        )
    is_described = config.method is not None and config.num_speculative_tokens is not None
    if config.model is not None and has_model(config.method) and not is_described:
        _read_speculators_format(config)
    if config.method == SUFFIX and config.num_speculative_tokens is None:
        config.num_speculative_tokens = min(config.suffix_decoding_max_tree_depth, SUFFIX_DRAFTS)
    if config.method == UNIVERSAL_DRAFT:
        config.method, config.use_heterogeneous_vocab = DRAFT_MODEL, True
    if not has_model(config.method) and not METHODS[config.method].in_vllm:
        original = partial(_describe_new_lookup, original)
    target = config.target_model_config
    if target is not None and has_model(config.method) and _is_in_targets_folder(config):
        if config.revision is None and config.code_revision is None:
            config.revision, config.code_revision = target.revision, target.code_revision
    if target is None or not target.trust_remote_code or TRUST_DRAFT_CODE.is_on or _has_targets_code(config):
        result = _describe_with_target(original, config)
    else:
        result = _describe_untrusted(partial(_describe_with_target, original), config)
    if config.use_heterogeneous_vocab and config.method == DRAFT_MODEL:
        # Upstream would reject its own flag in later checks, so it is replaced with ours, which `config.py` reads.
        config.use_heterogeneous_vocab = False
        setattr(config, IS_UNIVERSAL, True)
    setattr(config, LM_HEAD_QUANTIZATION, config.draft_lm_head_quantization)
    config.draft_lm_head_quantization = None
    method = METHODS.get(config.method)
    if target is not None and method is not None and method.in_target and _is_in_targets_folder(config):
        _share_positions(config)
    return result


def _share_positions(config: Any) -> None:
    """Set the maximum number of positions of drafter layers in the target's checkpoint to that of the target.

    vLLM reads the configuration of these layers again without --hf-overrides, so drafting would stop at the
    checkpoint's original maximum length (vllm#52873).
    """
    target, drafter = config.target_model_config, config.draft_model_config
    for name in ("max_position_embeddings", "rope_parameters"):
        if hasattr(target.hf_text_config, name):
            setattr(drafter.hf_text_config, name, getattr(target.hf_text_config, name))
    if config.max_model_len is None:
        drafter.max_model_len = target.max_model_len


def _read_speculators_format(config: Any) -> None:
    """Read settings that the user has not specified from the checkpoint."""
    from transformers import PretrainedConfig
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    try:
        in_file, _ = PretrainedConfig.get_config_dict(config.model, revision=config.revision)
    except (OSError, ValueError):  # upstream's error message names the model
        return
    if "speculators_config" not in in_file:
        return
    for name, value in SpeculatorsConfig.extract_vllm_speculative_config(in_file).items():
        if not getattr(config, name):
            setattr(config, name, value)


def _describe_new_lookup(original: Callable[..., Any], config: Any) -> Any:
    """Let vLLM process a method of this plugin that has no model as if it were n-gram drafting."""
    method, lookup = config.method, (config.prompt_lookup_min, config.prompt_lookup_max)
    config.method, config.model = NGRAM_GPU, config.model or method
    result = original(config)
    config.method = method
    config.prompt_lookup_min, config.prompt_lookup_max = lookup  # vLLM has set the defaults of n-gram drafting
    return result


def _is_in_targets_folder(config: Any) -> bool:
    """Whether the drafter's layers are in the target's checkpoint, as for MTP."""
    target = config.target_model_config
    return config.model is None or config.model in (target.model, target.model_weights)


def _has_targets_code(config: Any) -> bool:
    target = config.target_model_config
    same_revision = (config.revision, config.code_revision) == (target.revision, target.code_revision)
    return _is_in_targets_folder(config) and same_revision


def _describe_untrusted(original: Callable[..., Any], config: Any) -> Any:
    target = config.target_model_config
    target.trust_remote_code = False  # upstream passes this flag on to the drafter
    try:
        return original(config)
    except (RuntimeError, ValueError) as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UnsupportedConfigError(
            f"{config.model} in --speculative-config has its own code, but --trust-remote-code applies only to the "
            f"target; set {TRUST_DRAFT_CODE.name}=1 in the environment to run the drafter's as well."
        ) from error
    finally:
        target.trust_remote_code = True


# Maps fields of vLLM's `SpeculativeConfig` to values that are accepted in addition to upstream's.
_MORE_VALUES = {
    "rejection_sample_method": (*(name for name, rule in RULES.items() if not rule.in_vllm), "probabilistic"),
    "draft_sample_method": ("coupled",),
    "method": (
        *(name for name, method in METHODS.items() if not method.in_vllm),
        UNIVERSAL_DRAFT,
        *([MEDUSA] if FROM_0_33 else []),  # so that it can be rejected with a one-line error
    ),
}


def widen_speculative_options() -> None:
    """Allow this plugin's acceptance rules, draft sample methods, and methods in a speculative configuration.

    Reason: upstream's fields accept only fixed lists of values. The fields remain restricted, so that a typo is still
    rejected with a list of the valid values.
    Remove when: upstream supports these values or lets a platform add them.

    Add `draft_lm_head_quantization` to vLLM 0.32. `describe_drafters` hides the value of this option from upstream.
    Reason: vLLM 0.33 supports the option for heads in its second runner and rejects it for other drafters.
    Remove when: upstream leaves these checks to the platform.
    """
    from vllm.config import SpeculativeConfig

    if not FROM_0_33:
        fields, name = SpeculativeConfig.__dataclass_fields__, "draft_lm_head_quantization"
        fields[name] = copy(fields["revision"])
        fields[name].name, SpeculativeConfig.__annotations__[name] = name, fields[name].type
    widen(SpeculativeConfig, _MORE_VALUES)


@patches("vllm.engine.arg_utils:EngineArgs.create_speculative_config")
def name_nearest_methods(original: Callable[..., Any], args: Any, *more: Any, **named: Any) -> Any:
    """Suggest the methods whose names are closest to a mistyped one.

    Reason: upstream's error lists every name that it accepts, including one per model type for MTP.
    Remove when: upstream's error suggests a method.
    """
    from vllm.config import SpeculativeConfig

    method = (args.speculative_config or {}).get("method")
    if isinstance(method, str) and (nearest := get_close_matches(method.lower(), (*METHODS, UNIVERSAL_DRAFT))):
        if method not in get_args(get_args(SpeculativeConfig.__dataclass_fields__["method"].type)[0]):
            raise UnsupportedConfigError(
                f"Speculative method {shown(method)} does not exist; "
                f"set method in --speculative-config to {' or '.join(nearest)}."
            )
    return original(args, *more, **named)


@patches("vllm.engine.arg_utils:EngineArgs.create_engine_config")
def read_inc_from_quant_config(original: Callable[..., Any], args: Any, *more: Any, **named: Any) -> Any:
    """Allow `--quantization inc` with only QUANT_CONFIG set.

    Reason: vllm-gaudi requires the option together with QUANT_CONFIG, but vLLM itself looks for a different file in the
    checkpoint and fails if this file is missing.
    Remove when: upstream's `inc` reads QUANT_CONFIG.
    """
    if args.quantization == "inc" and QUANT_CONFIG.value is not None:
        from vllm.logger import init_logger  # this module is also imported with other vLLM releases

        init_logger(__name__).info("--quantization inc has no effect, because QUANT_CONFIG alone selects the format.")
        args.quantization = None
    return original(args, *more, **named)


@patches("vllm.sampling_params:SamplingParams._validate_spec_decode")
def admit_min_p_and_logit_bias(original: Callable[..., None], *args: Any, **named: Any) -> None:
    """Accept min_p and logit_bias in requests when speculation is enabled.

    Reason: upstream's front end rejects these parameters because one of its samplers ignores them at draft positions.
    Our sampler applies both of them at every position.
    Remove when: `SamplingParams._validate_spec_decode` accepts them.
    """


_ONLY_IN_SECOND_RUNNER = {
    "dspark speculative decoding",
    "mixed sliding/full dflash drafts",
    "DFlash candidate-head drafts",
    "adaptive draft verification",
}


def admit_features_of_second_runner() -> None:
    """Accept block drafters and adaptive verification in the configuration.

    Reason: upstream has two model runners. It treats a platform's own runner as the first one, which does not support
    these features. It also rejects adaptive verification without CUDA graphs or with LoRA, because its GPU kernels
    truncate batches, which our runner does not do. Since 0.33, upstream also ignores the schedule of drafts by batch
    size for some methods, or lowers the target's maximum length to that of the drafter, but our runner needs neither.
    Remove when: upstream leaves these checks to the platform.
    """
    from vllm.config import VllmConfig

    wrap(
        VllmConfig,
        "_get_v1_model_runner_unsupported_features",
        lambda original, config: [name for name in original(config) if name not in _ONLY_IN_SECOND_RUNNER],
    )
    wrap(VllmConfig, "_validate_adaptive_verification", do_nothing)
    if FROM_0_33:
        wrap(VllmConfig, "_maybe_disable_dynamic_sd_for_v1", do_nothing)
        wrap(VllmConfig, "_limit_max_model_len_to_draft", do_nothing)


@patches("vllm.config.speculative:has_arctic_inference")
def admit_suffix_without_arctic(original: Callable[[], bool]) -> bool:
    """Accept the method `suffix` even if arctic-inference is not installed.

    Reason: upstream uses the suffix tree in that package and rejects the method without the package. This plugin has
    its own suffix tree.
    Remove when: upstream imports the package only where it is used.
    """
    return True


@patches("vllm.model_executor.models.config:JinaRobertaModelConfig.verify_and_update_model_config")
def read_positions_of_xlm_roberta(original: Callable[..., None], model_config: Any) -> None:
    """If the configuration of an `XLMRobertaModel` lacks `position_embedding_type`, assume absolute positions.

    Reason: transformers 5 supports only absolute positions and does not write this field. Upstream reads the field to
    detect Jina's rotary variant and raises AttributeError if the field is missing.
    Remove when: `JinaRobertaModelConfig` accepts a configuration without the field.
    """
    config = model_config.hf_config
    config.position_embedding_type = getattr(config, "position_embedding_type", "absolute")
    original(model_config)


@patches(*([] if FROM_0_33 else ["vllm.transformers_utils.configs.step3p5:Step3p5Config.__init__"]))
def keep_layer_types_of_step_mtp(original: Callable[..., None], config: Any, *args: Any, **named: Any) -> None:
    """Keep the attention types of Step 3.5's MTP layers, which follow those of the target in the checkpoint's list.

    Reason: upstream truncates the list to the target's layers and then raises IndexError when it looks up the MTP
    layers (vllm-project/vllm#40000).
    Remove when: vLLM 0.32 is no longer supported. Its successor uses the class from transformers, which keeps the
    types.
    """
    original(config, *args, **named)
    if named.get("layer_types"):
        config.layer_types = named["layer_types"][: config.num_hidden_layers + config.num_nextn_predict_layers]


def leave_async_scheduling_to_the_platform() -> None:
    """Skip vLLM's check of whether a method supports async scheduling. `platforms/base.py` makes the decision instead.

    Reason: vLLM rejects or disables async scheduling for methods with which its own runner does not support it. Our
    runner also supports it with Medusa. With drafters that run on the host, our runner logs that steps are synchronous.
    Remove when: upstream asks the platform which methods support async scheduling and falls back for other methods.
    """
    from vllm.config import vllm as upstream

    # The check skips the methods in this list, which vLLM uses for nothing else.
    upstream.NgramGPUTypes = Literal[tuple(METHODS)]


def raise_refusals_unchanged() -> None:
    """Let our one-line ValueErrors pass through vLLM's configuration classes unchanged.

    Reason: pydantic catches every ValueError raised in a `__post_init__` and raises a ValidationError instead. The text
    of that error has several lines and ends with a link, and callers cannot catch the original error.
    Remove when: vLLM's configurations are no longer pydantic dataclasses, or pydantic can pass errors through.
    """
    from pydantic.dataclasses import is_pydantic_dataclass
    from vllm import config

    for value in vars(config).values():
        if isinstance(value, type) and is_pydantic_dataclass(value):
            raise_unchanged(UnsupportedConfigError, value)

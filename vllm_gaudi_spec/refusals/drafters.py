"""Checks that reject drafters and their options in --speculative-config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from vllm_gaudi_spec.config import MAX_DRAFTS, count_mtp_layers, find_mask_token
from vllm_gaudi_spec.methods import EAGLE3, MEDUSA, METHODS, NGRAM, NGRAM_GPU, RULES, SYNTHETIC

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig


# Options for loading and running a model as the drafter.
_DRAFTER_MODEL_OPTIONS = (
    "code_revision",
    "disable_eagle_block_drop",
    "disable_lookahead_block_hashes",
    "draft_load_config",
    "draft_tensor_parallel_size",
    "dspark_draft_topk",
    "enforce_eager",
    "kv_cache_dtype",
    "moe_backend",
    "quantization",
    "revision",
)
# The scheduler uses these options for heads.
_SCHEDULER_OPTIONS = ("disable_eagle_block_drop", "disable_lookahead_block_hashes")
# This plugin's layers do not use these options.
_DRAFTER_LAYER_OPTIONS = (
    *_SCHEDULER_OPTIONS,
    "dspark_draft_topk",
    "kv_cache_dtype",
    "moe_backend",
)
_CHAINED = (
    "BailingMoeV25MTPModel",
    "BailingMoeV3MTPModel",
    "DeepSeekMTPModel",
    "DeepseekV32MTPModel",
    "ExaoneMoeMTP",
    "Glm4MoeLiteMTPModel",
    "Glm4MoeMTPModel",
    "GlmOcrMTPModel",
    "HYV3MTPModel",
    "Step3p5MTP",
)
"""vLLM classes that run whichever MTP layer is requested. Other classes have one layer or always run the first."""


def weightless_refusals(spec_config: SpeculativeConfig) -> Iterator[str]:
    """Yield reasons to reject options for a method whose drafter is not a model."""
    method = spec_config.method
    if spec_config.draft_sample_method != "greedy":
        yield (
            f"draft_sample_method {spec_config.draft_sample_method} needs a drafter that is a model, and method "
            f"{method} has none; use greedy in --speculative-config."
        )
    if spec_config.rejection_sample_method == "probabilistic":
        *others, last = (rule for rule in RULES if rule != SYNTHETIC)
        yield (
            f"rejection_sample_method probabilistic needs a drafter that is a model, but method {method} has none; "
            f"use {', '.join(others)} or {last} in --speculative-config."
        )
    useless = [*set_options(spec_config, _DRAFTER_MODEL_OPTIONS), *_options_of_other_methods(spec_config)]
    names = (method, f"[{method}]", *((NGRAM, f"[{NGRAM}]") if method == NGRAM_GPU else ()))
    if "model" not in METHODS[method].options and spec_config.model not in (None, *names):
        useless.append("model")
    yield from _refuse_useless(spec_config, useless)


def drafter_model_refusals(spec_config: SpeculativeConfig) -> Iterator[str]:
    """Yield reasons to reject a drafter that is a model, or to reject its options."""
    num_ranks = spec_config.draft_parallel_config.tensor_parallel_size
    target_ranks = spec_config.target_parallel_config.tensor_parallel_size
    if num_ranks not in (1, target_ranks):
        yield f"draft_tensor_parallel_size {num_ranks} is neither 1 nor the target's {target_ranks}; use one of these."
    elif num_ranks != target_ranks and spec_config.use_gemma4_mtp():
        yield (
            f"{spec_config.model} reads the target's KV, which is sharded across {target_ranks} ranks; leave "
            "draft_tensor_parallel_size out of --speculative-config."
        )
    if spec_config.rejection_sample_method == "probabilistic" and spec_config.draft_sample_method == "coupled":
        yield (
            "rejection_sample_method probabilistic keeps the drafter's probabilities, but draft_sample_method "
            "coupled does not; use strict with coupled in --speculative-config."
        )
    method = METHODS[spec_config.method]
    yield from _refuse_other_methods(spec_config)
    if method.reads_hidden_states:
        yield from _head_refusals(spec_config)
    if "parallel_drafting" in method.options and spec_config.parallel_drafting:
        yield from _parallel_refusals(spec_config)
    useless = [*set_options(spec_config, _DRAFTER_LAYER_OPTIONS), *_options_of_other_methods(spec_config)]
    if method.is_head:
        useless = [name for name in useless if name not in _SCHEDULER_OPTIONS]
    yield from _refuse_useless(spec_config, useless)


def _refuse_other_methods(spec_config: SpeculativeConfig) -> Iterator[str]:
    """Yield a reason to reject a drafter whose architecture belongs to another method."""
    found = spec_config.draft_model_config.architectures
    for name, method in METHODS.items():
        if name != spec_config.method and set(found) & set(method.architectures):
            yield f"{spec_config.model} is a drafter of method {name}; set method to it in --speculative-config."
    is_parallel_head = any(name.lower().startswith("peagle") for name in found)
    if is_parallel_head and not (spec_config.method == EAGLE3 and spec_config.parallel_drafting):
        yield (
            f"{spec_config.model} is a P-EAGLE head; set method to {EAGLE3} and parallel_drafting to true in "
            "--speculative-config."
        )


def _head_refusals(spec_config: SpeculativeConfig) -> Iterator[str]:
    """Yield reasons to reject drafters that use the target's hidden states: heads, MTP layers, and Medusa."""
    config, target = spec_config.draft_model_config.hf_config, spec_config.target_model_config
    method = METHODS[spec_config.method]
    num_layers = count_mtp_layers(spec_config)
    if method.in_target and num_layers > 1 and not any(name in _CHAINED for name in config.architectures):
        yield (
            f"{target.model} has {num_layers} MTP layers, but vLLM's {config.architectures[0]} runs only the first; "
            "use another method in --speculative-config."
        )
    if method.architectures:
        yield from _architecture_refusals(spec_config)
    if spec_config.method == MEDUSA:
        num_heads = _num_medusa_heads(spec_config)
        if num_heads < spec_config.num_speculative_tokens:
            yield (
                f"{spec_config.model} has {num_heads} heads; set num_speculative_tokens in --speculative-config to "
                "that or less."
            )
    markov_head = getattr(config, "markov_head_type", None)
    if markov_head not in (None, "vanilla"):
        yield (
            f"{spec_config.model} has a Markov head of type {markov_head}, but only vanilla is supported; use another "
            "drafter in --speculative-config."
        )
    if (getattr(config, "dflash_config", None) or {}).get("sample_from_anchor"):
        yield (
            f"{spec_config.model} also predicts from the newest token's position (sample_from_anchor), which is "
            "supported only with method dspark; use another drafter in --speculative-config."
        )
    hidden_size = spec_config.draft_model_config.get_hidden_size()
    if method.reads_layers:
        hidden_size = getattr(config, "target_hidden_size", None) or hidden_size
    if spec_config.use_gemma4_mtp():
        hidden_size = config.backbone_hidden_size
    if hidden_size != target.get_hidden_size():
        yield (
            f"{spec_config.model} reads hidden states of size {hidden_size}, but those of {target.model} have size "
            f"{target.get_hidden_size()}; use a head that was trained for this model in --speculative-config."
        )
    vocab_size, target_size = spec_config.draft_model_config.get_vocab_size(), target.get_vocab_size()
    if method.is_head and not method.in_target and vocab_size != target_size:
        yield (
            f"{spec_config.model} has a vocabulary of {vocab_size} tokens, but {target.model} has {target_size}; give "
            "a head that was trained for this model in --speculative-config."
        )


def _architecture_refusals(spec_config: SpeculativeConfig) -> Iterator[str]:
    """Yield reasons to reject drafters whose architecture does not belong to the method."""
    found, supported = spec_config.draft_model_config.architectures, METHODS[spec_config.method].architectures
    if not set(found) & set(supported):
        yield (
            f"{spec_config.model} has the architecture {', '.join(found)}, which is not supported with method "
            f"{spec_config.method}; use a drafter whose architecture is one of {', '.join(supported)} in "
            "--speculative-config."
        )
    config = spec_config.draft_model_config.hf_config
    if "DFlash2DraftModel" in found and getattr(config, "draft_vocab_size", None) not in (None, config.vocab_size):
        yield (
            f"{spec_config.model} is a DFlash2 drafter with a reduced vocabulary, whose candidates vLLM does not "
            "translate; use one with the target's vocabulary in --speculative-config."
        )


def _parallel_refusals(spec_config: SpeculativeConfig) -> Iterator[str]:
    """Yield reasons to reject drafters that cannot draft all tokens in one forward pass."""
    model, mask_token = spec_config.draft_model_config, find_mask_token(spec_config)
    if mask_token is None:
        yield (
            f"{spec_config.model} specifies no mask token, so it was not trained to draft in parallel; leave "
            "parallel_drafting out of --speculative-config, or use another drafter."
        )
    elif not 0 <= mask_token < model.get_vocab_size():
        yield (
            f"{spec_config.model} has the mask token {mask_token}, but a vocabulary of {model.get_vocab_size()} "
            "tokens; use a drafter whose mask token is in its vocabulary in --speculative-config."
        )


def _num_medusa_heads(spec_config: SpeculativeConfig) -> int:
    """Return the number of heads from the config file, because vLLM's config has num_speculative_tokens instead."""
    from transformers import PretrainedConfig

    fields_of_file, _ = PretrainedConfig.get_config_dict(spec_config.model, revision=spec_config.revision)
    return next((int(value) for name, value in fields_of_file.items() if "num" in name and "heads" in name), MAX_DRAFTS)


def _refuse_useless(spec_config: SpeculativeConfig, names: list[str]) -> Iterator[str]:
    for name in names:
        yield f"{name} has no effect with method {spec_config.method}; leave it out of --speculative-config."


def set_options(spec_config: SpeculativeConfig, names: Iterable[str]) -> Iterator[str]:
    """Yield the options in `names` that the user has set. The default of each option must be None, False, or 0.

    Some options exist only in the newest vLLM release.
    """
    return (name for name in names if getattr(spec_config, name, None) not in (None, False, 0))


def _options_of_other_methods(spec_config: SpeculativeConfig) -> Iterator[str]:
    """Yield options set by the user that only other methods use, except `model`, which is checked separately."""
    names = {name for method in METHODS.values() for name in method.options}
    for option in fields(spec_config):
        if option.name not in names - {"model", *METHODS[spec_config.method].options}:
            continue
        value = getattr(spec_config, option.name)
        default = getattr(option.default, "default", option.default)  # pydantic may wrap the default
        if value != default if default else value not in (None, False, 0):
            yield option.name

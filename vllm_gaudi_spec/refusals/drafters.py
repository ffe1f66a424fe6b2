"""Which drafters do not work, and which of their options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from vllm_gaudi_spec.config import MAX_DRAFTS
from vllm_gaudi_spec.drafting.table import EAGLE3, MEDUSA, METHODS
from vllm_gaudi_spec.sampling.rules.table import RULES, SYNTHETIC

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig


# What says how a drafter's model is loaded and run.
_DRAFTER_MODEL_OPTIONS = (
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
    "disable_eagle_block_drop",
    "dspark_draft_topk",
    "kv_cache_dtype",
    "moe_backend",
)


def weightless_refusals(given: SpeculativeConfig) -> Iterator[str]:
    method = given.method
    if given.draft_sample_method != "greedy":
        yield (
            f"draft_sample_method {given.draft_sample_method} needs a drafter that is a model, and method {method} has "
            "none; use greedy in --speculative-config."
        )
    if given.rejection_sample_method == "probabilistic":
        *others, last = (rule for rule in RULES if rule != SYNTHETIC)
        yield (
            f"rejection_sample_method probabilistic needs a drafter that is a model, and method {method} has none; "
            f"use {', '.join(others)} or {last} in --speculative-config."
        )
    useless = [*set_options(given, _DRAFTER_MODEL_OPTIONS), *_options_of_others(given)]
    names = (method, f"[{method}]", *(("ngram", "[ngram]") if method == "ngram_gpu" else ()))
    if "model" not in METHODS[method].options and given.model not in (None, *names):
        useless.append("model")
    yield from _refuse_useless(given, useless)


def drafter_model_refusals(given: SpeculativeConfig) -> Iterator[str]:
    own = given.draft_parallel_config.tensor_parallel_size
    target = given.target_parallel_config.tensor_parallel_size
    if own not in (1, target):
        yield f"draft_tensor_parallel_size {own} is neither 1 nor the target's {target}; use one of these."
    if given.rejection_sample_method == "probabilistic" and given.draft_sample_method == "coupled":
        yield (
            "rejection_sample_method probabilistic keeps the drafter's probabilities, draft_sample_method coupled does "
            "not; use strict with coupled in --speculative-config."
        )
    method = METHODS[given.method]
    if method.reads_hidden_states:
        yield from _head_refusals(given)
    useless = [*set_options(given, _DRAFTER_LAYER_OPTIONS), *_options_of_others(given)]
    if method.is_head:  # the scheduler reads it
        useless = [name for name in useless if name != "disable_eagle_block_drop"]
    yield from _refuse_useless(given, useless)


def _head_refusals(given: SpeculativeConfig) -> Iterator[str]:
    config, target = given.draft_model_config.hf_config, given.target_model_config
    method = METHODS[given.method]
    if given.use_gemma4_mtp() or given.use_step3p5_mtp():
        yield f"The MTP layers of {target.model} are not supported yet; use another method in --speculative-config."
    if method.in_target and getattr(config, "n_predict", 1) != 1:
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
    if method.is_head and not method.in_target and own != theirs:
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


def set_options(given: SpeculativeConfig, names: Iterable[str]) -> Iterator[str]:
    """Those of `names` that the user set: left alone, each is None, False or 0."""
    return (name for name in names if getattr(given, name) not in (None, False, 0))


def _options_of_others(given: SpeculativeConfig) -> Iterator[str]:
    """Options that the user set and that other methods than this one take. `model` is looked at by itself."""
    names = {name for method in METHODS.values() for name in method.options}
    for option in fields(given):
        if option.name not in names - {"model", *METHODS[given.method].options}:
            continue
        value = getattr(given, option.name)
        default = getattr(option.default, "default", option.default)  # pydantic may wrap it
        if value != default if default else value not in (None, False, 0):
            yield option.name

"""Checks that reject speculative configurations for any drafter; `drafters.py` has checks for specific drafters."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from vllm_gaudi_spec.config import (
    ADDITIONAL_CONFIG_KEY,
    IS_UNIVERSAL,
    LM_HEAD_QUANTIZATION,
    MAP,
    MAX_DRAFTS,
    RETOKENIZE,
    SLEM,
    TLI,
    UNIVERSAL_DRAFT,
    Options,
    Speculation,
    get_target_config,
    ranks_in_step,
)
from vllm_gaudi_spec.methods import MEDUSA, METHODS, has_model
from vllm_gaudi_spec.refusals.drafters import drafter_model_refusals, set_options, weightless_refusals

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend


# Maps options that no method uses to an addition to the error message.
_NO_EFFECT = {
    "disable_padded_drafter_batch": ", since all rows of a batch draft in one shape",
    "index_share_for_mtp_iteration": "",
    "use_local_argmax_reduction": "",
    "xpress_topc": "",
}


def speculation_refusals(vllm_config: VllmConfig, backend: DeviceBackend) -> Iterator[str]:
    spec_config, options = vllm_config.speculative_config, Options.from_vllm(vllm_config)
    yield from _audit_refusals(vllm_config, options)
    if spec_config is None:
        yield from _useless_universal_options(options, "no speculation")
        return
    if spec_config.method not in METHODS:
        yield (
            f"Speculative method {spec_config.method} is not supported yet; "
            f"use one of {', '.join((*METHODS, UNIVERSAL_DRAFT))} in --speculative-config."
        )
        return
    if spec_config.num_speculative_tokens > MAX_DRAFTS:
        yield (
            f"{spec_config.num_speculative_tokens} drafts per step are too many; "
            f"set num_speculative_tokens in --speculative-config to {MAX_DRAFTS} or less."
        )
    if spec_config.enable_adaptive_verification and ranks_in_step(vllm_config) > 1:
        # A rank that tries a smaller number of drafts is padded to the shape of its peers, so its step times do not
        # reflect its choice.
        yield (
            "enable_adaptive_verification is not supported with data parallelism of a mixture of experts; leave it out "
            "of --speculative-config."
        )
    shortest = 1 + spec_config.num_speculative_tokens
    if 0 < (threshold := vllm_config.scheduler_config.long_prefill_token_threshold) < shortest:
        # vLLM schedules a full step of drafts for a resumed request and fails if the threshold shortens the step.
        yield (
            f"--long-prefill-token-threshold {threshold} is too small for {shortest - 1} drafts; set it to {shortest} "
            "or more, or leave it out."
        )
    longest = get_target_config(vllm_config).max_model_len
    if spec_config.max_model_len is not None and spec_config.max_model_len > longest:
        yield (
            f"max_model_len {spec_config.max_model_len} in --speculative-config is more than the target's {longest}; "
            "use less, or leave it out."
        )
    yield from _pipeline_refusals(vllm_config)
    yield from _lm_head_refusals(vllm_config, options, backend)
    for name in set_options(spec_config, _NO_EFFECT):
        yield f"{name} is not supported{_NO_EFFECT[name]}; leave it out of --speculative-config."
    yield from _universal_refusals(vllm_config, options)
    if METHODS[spec_config.method].has_model:
        yield from drafter_model_refusals(spec_config)
    else:
        yield from weightless_refusals(spec_config)
    if vllm_config.model_config.logits_processors:
        yield (
            "Custom logits processors are not supported when speculative decoding is enabled; leave out "
            "--logits-processors, or --speculative-config."
        )


def _pipeline_refusals(vllm_config: VllmConfig) -> Iterator[str]:
    spec_config = vllm_config.speculative_config
    untested = {
        f"method {spec_config.method}": not METHODS[spec_config.method].runs_on_last_stage,
        f"method {UNIVERSAL_DRAFT}": getattr(spec_config, IS_UNIVERSAL, False),
        "parallel_drafting": spec_config.parallel_drafting,
        "enable_adaptive_verification": spec_config.enable_adaptive_verification,
    }
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    for what in (what for what, is_used in untested.items() if is_used and num_stages > 1):
        yield (
            f"Pipeline parallelism is not supported with {what} in --speculative-config; use another drafter, or "
            "--pipeline-parallel-size 1."
        )


def _lm_head_refusals(vllm_config: VllmConfig, options: Options, backend: DeviceBackend) -> Iterator[str]:
    spec_config = vllm_config.speculative_config
    if (quantization := getattr(spec_config, LM_HEAD_QUANTIZATION, None)) is None:
        return
    method, models = spec_config.method, [spec_config.draft_model_config]
    if has_model(method) and METHODS[method].reads_hidden_states:
        models.append(vllm_config.model_config)  # The head may use the matrix of its target.
    has_matrix = has_model(method) and method != MEDUSA and not spec_config.use_gemma4_mtp()
    reasons = {
        f"is not supported with this drafter of method {method}": not has_matrix,
        f"is {quantization}, but only fp8 is supported": quantization != "fp8",
        f"needs FP8 matrix products, which {backend.traits.name} does not have": backend.weights.fp8_logits is None,
        "does not work with float16": any(str(one.head_dtype) == "torch.float16" for one in models if one),
        "does not work with a head_dtype other than dtype": any(one.head_dtype != one.dtype for one in models if one),
        "does not work with draft_quant_config": options.draft_quant_config is not None,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        yield f"draft_lm_head_quantization {reason}; leave it out of --speculative-config."


def _audit_refusals(vllm_config: VllmConfig, options: Options) -> Iterator[str]:
    if not options.audit_every:
        return
    option = f"audit_every in additional_config.{ADDITIONAL_CONFIG_KEY}"
    if vllm_config.speculative_config is None:
        yield f"{option} has no effect without speculation; leave it out, or set --speculative-config."
    elif ranks_in_step(vllm_config) > 1:
        # An audit on one rank would need steps on all ranks, and only client requests start such steps.
        yield f"{option} is not supported with data parallelism of a mixture of experts; leave it out."


def _universal_refusals(vllm_config: VllmConfig, options: Options) -> Iterator[str]:
    speculation = Speculation.from_vllm(vllm_config)
    assert speculation is not None
    if not speculation.universal:
        yield from _useless_universal_options(options, f"method {speculation.method}")
        return
    if speculation.universal_match == SLEM and not speculation.retokenizes:
        yield (
            f"universal_match {SLEM} drafts the drafter's own tokens, so the drafter must also read the context in "
            f"them; set universal_context in additional_config.{ADDITIONAL_CONFIG_KEY} to {RETOKENIZE}."
        )
    if speculation.universal_match == SLEM and speculation.drafting != "greedy":
        yield (
            f"universal_match {SLEM} treats drafts as greedy; leave draft_sample_method and "
            f"rejection_sample_method out of --speculative-config, or use universal_match {TLI}."
        )
    if speculation.retokenizes and vllm_config.speculative_config.parallel_drafting:
        yield (
            f"parallel_drafting does not work with universal_context {RETOKENIZE}; leave it out of "
            f"--speculative-config, or set universal_context in additional_config.{ADDITIONAL_CONFIG_KEY} to {MAP}."
        )
    if options.universal_kv_len is not None and not speculation.retokenizes:
        yield f"universal_kv_len has an effect only with universal_context {RETOKENIZE}; leave it out."


def _useless_universal_options(options: Options, used: str) -> Iterator[str]:
    for name in ("universal_context", "universal_match", "universal_kv_len"):
        if getattr(options, name) is not None:
            yield (
                f"additional_config.{ADDITIONAL_CONFIG_KEY}.{name} has no effect with {used}; leave it out, or use "
                f"method {UNIVERSAL_DRAFT} in --speculative-config."
            )


def list_installed_logits_processors() -> list[str]:
    """Return logits processors from installed packages, which vLLM adds to the user's without speculation."""
    from vllm_gaudi_spec.upstream.sampling import LOGITSPROCS_GROUP

    return sorted(processor.name for processor in entry_points(group=LOGITSPROCS_GROUP))

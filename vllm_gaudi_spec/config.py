"""All configuration, read once: the environment, and `additional_config["gaudi_spec"]` of vLLM.

Nobody else in the package reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig
    from vllm.sampling_params import SamplingParams

ADDITIONAL_CONFIG_KEY = "gaudi_spec"


class UnsupportedConfigError(RuntimeError):
    """The user asked for something that this platform cannot do; the message names the option to change.

    Not a ValueError on purpose: pydantic swallows those into a report whose last line says nothing.
    """


def requested_device() -> str | None:
    """The device named by VGS_DEVICE, or None when the choice is ours."""
    return os.environ.get("VGS_DEVICE") or None


def skip_warmup() -> bool:
    return os.environ.get("VGS_SKIP_WARMUP", "0") not in ("", "0")


def vllm_plugins_allowed() -> set[str] | None:
    """The plugins that VLLM_PLUGINS lets in; None means all."""
    names = os.environ.get("VLLM_PLUGINS")
    return None if names is None else {name.strip() for name in names.split(",")}


_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_CHOSEN_BY = "VGS_START_METHOD_CHOSEN_BY"


def choose_start_method(choose: Callable[[], str]) -> None:
    """How vLLM starts its engine process: as the user said, else as `choose` says, asked anew for each engine of a
    process. Engine processes, which inherit the answer, do not ask."""
    chosen_by = os.environ.get(_CHOSEN_BY)
    if _START_METHOD in os.environ and chosen_by != str(os.getpid()):
        return
    os.environ[_START_METHOD] = choose()
    os.environ[_CHOSEN_BY] = str(os.getpid())


def cache_folder() -> Path:
    """Where this project keeps what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "vllm_gaudi_spec"


def name_process_group(init_method: str) -> None:
    """vLLM's shared-memory collectives for the CPU find each other by this name."""
    os.environ["VLLM_DIST_IDENT"] = init_method.rsplit("/", 1)[-1].rsplit(":", 1)[-1]


def kv_cache_space_gib() -> int | None:
    """Upstream's older way to size the KV cache on a CPU."""
    value = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    return int(value) if value else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user can set under `additional_config["gaudi_spec"]`.

    None means that the device's own default is taken.
    """

    batch_buckets: tuple[int, ...] | None = None
    """Decode batch sizes; each decode step is padded up to one of these."""
    prefill_buckets: tuple[int, ...] | None = None
    """Prompt chunk lengths; each chunk is padded up to one of these."""
    prefill_rows: tuple[int, ...] | None = None
    """How many prompt chunks of one length may share a step."""
    warmup_tokens: int | None = None
    """Shapes of up to this many tokens are run during warm-up, larger ones only listed. -1 runs them all."""
    universal_context: str | None = None
    """How a drafter with another vocabulary reads: `map`, id by id, or `retokenize`, the text in its own tokens."""
    universal_match: str | None = None
    """How its drafts become the target's tokens: `tli`, only tokens of both are drafted, or `slem`, all of its own are,
    and their text is written anew."""
    universal_slab: int | None = None
    """For `retokenize`: how many tokens of its own the drafter can keep of each request."""

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> Options:
        given: dict[str, Any] = dict((vllm_config.additional_config or {}).get(ADDITIONAL_CONFIG_KEY, {}))
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise UnsupportedConfigError(
                f"additional_config.{ADDITIONAL_CONFIG_KEY} has unknown option(s) {', '.join(unknown)}; "
                f"known are {', '.join(known)}."
            )
        return cls(**{name: _READ.get(name, _bucket_list)(name, value) for name, value in given.items()})


def _one_of(*values: str) -> Callable[[str, Any], str]:
    def read(name: str, value: Any) -> str:
        if value not in values:
            raise UnsupportedConfigError(
                f"additional_config.{ADDITIONAL_CONFIG_KEY}.{name} must be {' or '.join(values)}, got {value!r}."
            )
        return str(value)

    return read


def _positive(name: str, value: Any) -> int:
    if _integer(name, value) < 1:
        raise UnsupportedConfigError(
            f"additional_config.{ADDITIONAL_CONFIG_KEY}.{name} must be 1 or more, got {value}."
        )
    return int(value)


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnsupportedConfigError(
            f"additional_config.{ADDITIONAL_CONFIG_KEY}.{name} must be an integer, got {value!r}."
        )
    return value


def _bucket_list(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(v, int) and v > 0 for v in value):
        raise UnsupportedConfigError(
            f"additional_config.{ADDITIONAL_CONFIG_KEY}.{name} must be a list of positive integers, got {value!r}."
        )
    return tuple(sorted(set(value)))


MAP, RETOKENIZE = "map", "retokenize"
TLI, SLEM = "tli", "slem"
# How options are read that are not lists of buckets.
_READ: dict[str, Callable[[str, Any], Any]] = {
    "warmup_tokens": _integer,
    "universal_context": _one_of(MAP, RETOKENIZE),
    "universal_match": _one_of(TLI, SLEM),
    "universal_slab": _positive,
}

UNIVERSAL_DRAFT = "universal_draft"
"""A method of ours: vLLM's `draft_model` with a vocabulary of its own."""
_DEFAULT_SLAB = 2048
IS_UNIVERSAL = "gaudi_spec_universal_draft"
"""How compat.py marks vLLM's configuration when it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What vLLM's `speculative_config` says, as far as the runner needs it."""

    method: str
    num_drafts: int
    """k: the most tokens drafted for a row in a step."""
    rule: str
    """`rejection_sample_method`: strict, standard, block, synthetic."""
    drafting: str
    """`draft_sample_method`: greedy (a drafter's best token; n-grams and suffixes too), probabilistic, coupled."""
    drafter_max_len: int | None
    """No drafter sees a position at or past this."""
    universal: bool = False
    """The drafter has a vocabulary of its own."""
    context: str = MAP
    """How it reads then: `map` or `retokenize`."""
    match: str = TLI
    """How its drafts become the target's tokens: `tli` or `slem`."""
    slab: int = 0
    """For `retokenize`: how many tokens it keeps of each request."""
    synthetic_rates: tuple[float, ...] = ()
    """For the synthetic rule: how often the first i + 1 drafts are all accepted."""

    @property
    def has_model(self) -> bool:
        """Whether the drafter is a model, to be loaded beside the target."""
        return self.method not in _WEIGHTLESS_METHODS

    @property
    def retokenizes(self) -> bool:
        """Whether the drafter reads the text in its own tokens, which the host keeps."""
        return self.universal and self.context == RETOKENIZE

    @property
    def keeps_laws(self) -> bool:
        """Whether the rule looks at the laws that drafts were drawn from."""
        return self.drafting == "probabilistic" and self.rule in ("standard", "block")

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> Speculation | None:
        given = vllm_config.speculative_config
        if given is None:
            return None
        rule, drafting = given.rejection_sample_method, given.draft_sample_method
        if rule == "probabilistic":
            rule, drafting = "standard", "probabilistic"
        longest = given.max_model_len
        if given.method not in _WEIGHTLESS_METHODS:
            longest = given.draft_model_config.max_model_len
        options = Options.from_vllm(vllm_config)
        universal, context = getattr(given, IS_UNIVERSAL, False), options.universal_context or MAP
        return cls(
            method=given.method,
            num_drafts=given.num_speculative_tokens,
            rule=rule,
            drafting=drafting,
            drafter_max_len=longest,
            universal=universal,
            context=context,
            match=options.universal_match or TLI,
            slab=_slab(given, options) if universal and context == RETOKENIZE else 0,
            synthetic_rates=tuple(given.synthetic_acceptance_rates or ()),
        )


def _slab(given: SpeculativeConfig, options: Options) -> int:
    """A text may have more of the drafter's tokens than of the target's, to whose context vLLM cuts the drafter's."""
    model = given.draft_model_config
    own = given.max_model_len or getattr(model.hf_text_config, "max_position_embeddings", model.max_model_len)
    default = min(_DEFAULT_SLAB, 2 * given.target_model_config.max_model_len)
    return int(min(options.universal_slab or default, own))


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raise at start-up, with the option to change, for every combination that would not work later."""
    if vllm_config.model_config is None:
        return
    for refusals in (_model_refusals, _feature_refusals, _speculation_refusals):
        for reason in refusals(vllm_config):
            raise UnsupportedConfigError(reason)


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
    if model.use_mla:
        yield f"{model.model} uses MLA attention, which is not supported yet; use a model without it."
    if model.is_moe and vllm_config.parallel_config.data_parallel_size > 1:
        yield "Mixture-of-experts models do not run data parallel yet; use --data-parallel-size 1."


def _feature_refusals(vllm_config: VllmConfig) -> Iterator[str]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if vllm_config.lora_config is not None:
        yield "LoRA is not supported yet; leave out --enable-lora."
    if parallel.pipeline_parallel_size > 1:
        yield "Pipeline parallelism is not supported; use --pipeline-parallel-size 1."
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "Context parallelism is not supported; use 1 for the decode and prefill context parallel sizes."
    if parallel.enable_dbo:
        yield "Dual-batch overlap is not supported; leave out --enable-dbo."
    if vllm_config.kv_transfer_config is not None:
        yield "KV transfer is not supported; leave out --kv-transfer-config."
    if model.enable_prompt_embeds:
        yield "Prompt embeddings are not supported; leave out --enable-prompt-embeds."
    if vllm_config.cache_config.cache_dtype != "auto":
        yield "The KV cache has the model's dtype; use --kv-cache-dtype auto."
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


MAX_DRAFTS = 16
"""The most drafts of a request in one step."""

# Methods whose drafter has no model: it looks tokens up, or is a class of the user's that answers with token ids.
_WEIGHTLESS_METHODS = ("ngram", "ngram_gpu", "suffix", "custom_class")
_METHODS = (*_WEIGHTLESS_METHODS, "draft_model")

# What nothing here listens to, whatever the method.
_NO_EFFECT = (
    "disable_padded_drafter_batch",
    "enable_adaptive_verification",
    "parallel_drafting",
    "use_local_argmax_reduction",
)
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
    if given is None:
        yield from _useless_universal_options(vllm_config, "no speculation")
        return
    if given.method not in _METHODS:
        yield (
            f"Speculative method {given.method} is not supported yet; "
            f"use one of {', '.join(_METHODS)} in --speculative-config."
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
        yield f"{name} is not supported; leave it out of --speculative-config."
    yield from _universal_refusals(vllm_config)
    if given.method in _WEIGHTLESS_METHODS:
        yield from _weightless_refusals(given)
    elif given.method in _METHODS:
        yield from _drafter_model_refusals(given)
    if brings_logits_processors(vllm_config.model_config):
        yield (
            "Custom logits processors do not work with speculative decoding; leave out --logits-processors and "
            "uninstall the packages that bring some, or leave out --speculative-config."
        )


def _universal_refusals(vllm_config: VllmConfig) -> Iterator[str]:
    speculation, options = Speculation.from_vllm(vllm_config), Options.from_vllm(vllm_config)
    assert speculation is not None
    if not speculation.universal:
        yield from _useless_universal_options(vllm_config, f"method {speculation.method}")
        return
    if speculation.match == SLEM and not speculation.retokenizes:
        yield (
            f"universal_match {SLEM} drafts in the drafter's own tokens, so the drafter has to read them too; "
            f"set universal_context in additional_config.{ADDITIONAL_CONFIG_KEY} to {RETOKENIZE}."
        )
    if speculation.match == SLEM and speculation.drafting != "greedy":
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
    if own != target:
        yield f"draft_tensor_parallel_size {own} is not the target's {target}; leave it out of --speculative-config."
    if given.rejection_sample_method == "probabilistic" and given.draft_sample_method == "coupled":
        yield (
            "rejection_sample_method probabilistic keeps the drafter's probabilities, draft_sample_method coupled does "
            "not; use strict with coupled in --speculative-config."
        )
    useless = [*_set_options(given, _DRAFTER_LAYER_OPTIONS), *_set_options(given, _NGRAM_OPTIONS)]
    yield from _refuse_useless(given, [*useless, *_changed_suffix_options(given)])


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


REQUEST_OPTION = "num_speculative_tokens"
"""In a request's `extra_args`, which is `vllm_xargs` over HTTP: the most drafts it wants in a step, 0 for none."""


def unsupported_request(params: SamplingParams) -> str | None:
    """Why a request can not be served, or None."""
    if params.thinking_token_budget is not None:
        return "thinking_token_budget is not supported by this platform; leave it out."
    if params.prompt_logprob_token_ids is not None:
        return "prompt_logprob_token_ids is not supported by this platform; use prompt_logprobs."
    wanted = (params.extra_args or {}).get(REQUEST_OPTION, 0)
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 0:
        return f"{REQUEST_OPTION} in vllm_xargs (extra_args) must be an integer, 0 or more, got {wanted!r}."
    return None

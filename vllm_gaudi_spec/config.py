"""The configuration that users pass through vLLM: `speculative_config` and `additional_config["gaudi_spec"]`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.methods import METHODS, RULES, has_model

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig


ADDITIONAL_CONFIG_KEY = "gaudi_spec"


class UnsupportedConfigError(ValueError):
    """Raised for configurations that this platform does not support. The message names the option to change.

    Pydantic catches this error in vLLM's configurations; `upstream.raise_refusals_unchanged` then raises it unchanged.
    """


class UnusableInstallationError(UnsupportedConfigError):
    """Raised if vLLM cannot run with this installation. The message contains the remedy, so no traceback is printed."""


def in_one_line(error: BaseException) -> str:
    """Format an error as a single line, which is printed last."""
    details = getattr(error, "errors", None)  # pydantic's list of validation errors
    if callable(details):
        message = "; ".join(": ".join([*map(str, item["loc"]), item["msg"]]) for item in details())
    else:
        message = str(error)
    return " ".join(message.split()) or type(error).__name__


def format_size(num_bytes: int) -> str:
    """Format a size in GiB, MiB or KiB."""
    for unit, shift, digits in (("GiB", 30, 2), ("MiB", 20, 1)):
        if abs(num_bytes) >= 1 << shift:
            return f"{num_bytes / (1 << shift):.{digits}f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"


OTHER_MODEL = "use a model in bfloat16 or float16"
"""The remedy suggested when a quantized checkpoint cannot be read."""


def explain_pickled_weights(model: str, file: str | Path) -> str:
    """Return a message that explains why pickled weights are not loaded."""
    return (
        f"The weights of {model} are pickles ({Path(file).name}), and reading a pickle runs code in it; "
        "use a folder with *.safetensors (SECURITY.md explains how to convert the file)."
    )


REFUSED_ADAPTER = "cannot be served"
"""Part of every message about an invalid LoRA adapter. The server matches this text, because it receives only text."""


def ranks_in_step(vllm_config: VllmConfig, model: ModelConfig | None = None) -> int:
    """Return the number of data-parallel ranks that run forward passes together, which is 1 for models without experts.

    Args:
        model: The model to check, if it differs from the one in the configuration, such as a draft head.
    """
    parallel, model = vllm_config.parallel_config, model or vllm_config.model_config
    return parallel.data_parallel_size if model is not None and model.is_moe else 1


def get_target_config(vllm_config: VllmConfig) -> ModelConfig:
    """Return the target's configuration. In a drafter's copy of `vllm_config`, `model_config` describes the drafter."""
    spec_config = vllm_config.speculative_config
    target = None if spec_config is None else spec_config.target_model_config
    return target or vllm_config.model_config  # `target_model_config` is not set for n-gram, suffix and custom drafters


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options in `additional_config["gaudi_spec"]`. None selects the device's default."""

    batch_buckets: tuple[int, ...] | None = None
    """The batch sizes of decode steps. Each decode step is padded to one of them."""
    prefill_buckets: tuple[int, ...] | None = None
    """The lengths of prompt chunks. Each chunk is padded to one of them."""
    block_buckets: tuple[int, ...] | None = None
    """The total numbers of KV blocks in decode steps (Gaudi only). Each decode step is padded to one of them."""
    prefill_rows: tuple[int, ...] | None = None
    """The numbers of prompt chunks that may share a forward pass."""
    warmup_tokens: int | None = None
    """The maximum number of tokens in the shapes that warm-up runs; larger shapes are only listed. -1 runs all shapes.
    The default is 16 on a CPU and -1 elsewhere."""
    universal_context: str | None = None
    """How a drafter with another vocabulary reads the context: `map` token IDs (default) or `retokenize` the text."""
    universal_match: str | None = None
    """How such a drafter's drafts become target tokens: `tli` (default) drafts only tokens in both vocabularies;
    `slem` drafts any token and tokenizes the drafted text for the target."""
    universal_kv_len: int | None = None
    """Maximum number of drafter tokens kept per request with `retokenize`. The default is 2048 or twice
    `--max-model-len`, whichever is smaller."""
    state_snapshots: int | None = None
    """The number of recurrent states that the prefix cache keeps, for models that have them. The default is
    `--max-num-seqs`, but at most 32."""
    audit_every: int = 0
    """When the engine is idle, decode one in this many requests again without drafts and compare the results."""
    cpu_weights: str | None = None
    """The format of linear weights on a CPU: `float32` or `float16`. The default is float32. Steps with few tokens then
    use an additional float16 copy of each matrix that float16 represents exactly."""
    weight_kernels: str | None = None
    """How quantized checkpoints run: `reference` dequantizes weights while loading, and `native` uses the device's
    kernels for the format. The default is `native` if the device has such kernels."""
    draft_quant_config: str | None = None
    """The drafter's quantization file. The environment variable QUANT_CONFIG names the target's file."""

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> Options:
        """Return the options in `additional_config["gaudi_spec"]`.

        Raises:
            UnsupportedConfigError: An option is unknown or has a wrong value.
        """
        every = _object(vllm_config.additional_config, "additional_config")
        requested = _object(every.get(ADDITIONAL_CONFIG_KEY))
        names = [f.name for f in fields(cls)]
        for key in every:
            if meant := _guess_meaning(key, names):
                raise UnsupportedConfigError(f"additional_config has no {shown(key)}; did you mean {meant}?")
        if unknown := [name for name in requested if name not in names]:
            raise UnsupportedConfigError(
                f"additional_config.{ADDITIONAL_CONFIG_KEY} has unknown option(s) {shown(unknown)}; "
                f"known are {', '.join(names)}."
            )
        return cls(**{name: _read_option(name, value) for name, value in requested.items()})


def _guess_meaning(key: str, options: list[str]) -> str | None:
    """Return the option that an unknown key in `additional_config` probably refers to, or None."""
    if key in options:
        return f"additional_config.{ADDITIONAL_CONFIG_KEY}.{key}"
    if key != ADDITIONAL_CONFIG_KEY and get_close_matches(str(key).lower(), [ADDITIONAL_CONFIG_KEY]):
        return ADDITIONAL_CONFIG_KEY
    return None


def shown(value: Any) -> str:
    """Format a user's value for a message: on one line, and shortened if necessary."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


_MAX_SHOWN = 100


def _object(value: Any, name: str = f"additional_config.{ADDITIONAL_CONFIG_KEY}") -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UnsupportedConfigError(f"{name} must be an object, got {shown(value)}.")
    return value


MAP, RETOKENIZE = "map", "retokenize"
TLI, SLEM = "tli", "slem"
FLOAT32, FLOAT16 = "float32", "float16"
FP8_KV = "fp8_e4m3"
"""The only supported --kv-cache-dtype besides the model's dtype. vLLM's other names for e4m3 are mapped to it."""
REFERENCE, NATIVE = "reference", "native"
GAUDI2, GAUDI3 = "gaudi2", "gaudi3"
E4M3_MAX = {GAUDI2: 240.0, GAUDI3: 448.0}
"""The largest e4m3 value on each Gaudi. Gaudi 2 reserves the highest exponent for infinities, as in IEEE 754."""
GAUDIS = tuple(E4M3_MAX)

Check = tuple[str, Callable[[Any], bool]]
"""A description of an option's valid values, and a function that checks a value."""


def _one_of(*values: str) -> Check:
    return " or ".join(values), lambda value: value in values


def _at_least(minimum: int) -> Check:
    return f"an integer of {minimum} or more", lambda value: type(value) is int and value >= minimum


def _is_bucket_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(type(item) is int and item > 0 for item in value)


_BUCKETS: Check = "a list of positive integers", _is_bucket_list
_CHECKS: dict[str, Check] = {
    "batch_buckets": _BUCKETS,
    "prefill_buckets": _BUCKETS,
    "block_buckets": _BUCKETS,
    "prefill_rows": _BUCKETS,
    "warmup_tokens": _at_least(-1),
    "universal_context": _one_of(MAP, RETOKENIZE),
    "universal_match": _one_of(TLI, SLEM),
    "universal_kv_len": _at_least(1),
    "audit_every": _at_least(0),
    "state_snapshots": _at_least(1),
    "cpu_weights": _one_of(FLOAT32, FLOAT16),
    "weight_kernels": _one_of(REFERENCE, NATIVE),
    "draft_quant_config": ("a text", lambda value: isinstance(value, str) and value != ""),
}


def _read_option(name: str, value: Any) -> Any:
    """Return an option's value. Bucket lists are sorted and deduplicated."""
    expected, is_valid = _CHECKS[name]
    if not is_valid(value):
        raise UnsupportedConfigError(
            f"additional_config.{ADDITIONAL_CONFIG_KEY}.{name} must be {expected}, got {shown(value)}."
        )
    return tuple(sorted(set(value))) if _CHECKS[name] is _BUCKETS else value


MAX_DRAFTS = 16
"""The maximum number of draft tokens per request in one step."""
SUFFIX_DRAFTS = 15
"""The default for `suffix`, which every device can verify."""

# Limits per request. The first two equal the limits in vLLM's GPU sampler for logit_bias and bad_words.
MAX_LOGIT_EDITS = 1024
"""Maximum number of biased tokens, bad-word spellings, and end tokens suppressed by min_tokens, counted together."""
MAX_BAD_WORD_TOKENS = 1024
"""The maximum number of tokens in all spellings of all bad words."""
MAX_BAD_WORD_TEXT = 16 * MAX_BAD_WORD_TOKENS
"""The maximum number of characters in bad words, which is checked before they are tokenized."""
MAX_CONSTRAINT_TEXT = 256 * 1024
"""The maximum number of characters in a JSON schema, regex, grammar or list of choices. Compiling a longer one takes
seconds and more than 64 MiB, which would delay other requests."""

REQUEST_OPTION = "num_speculative_tokens"
"""The key in a request's `extra_args` (`vllm_xargs` over HTTP) that sets its maximum number of drafts per step."""


UNIVERSAL_DRAFT = "universal_draft"
"""Our name for vLLM's method `draft_model` when the drafter and the target have different vocabularies."""
_DEFAULT_KV_LEN = 2048
IS_UNIVERSAL, LM_HEAD_QUANTIZATION = "gaudi_spec_universal_draft", "gaudi_spec_lm_head_quantization"
"""Attributes that `upstream/` adds to a speculative configuration, for this method and `draft_lm_head_quantization`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The settings from vLLM's `speculative_config` that the runner uses."""

    method: str
    num_drafts: int
    """k: the maximum number of draft tokens per row in a step."""
    rule: str
    """`rejection_sample_method`: one of `RULES`."""
    drafting: str
    """`draft_sample_method`: greedy (also for n-gram and suffix drafters), probabilistic or coupled."""
    drafter_max_len: int | None
    """The drafter's maximum length, or None if it has none."""
    universal: bool = False
    """Whether the drafter and the target have different vocabularies."""
    universal_context: str = MAP
    """How the drafter reads the context: `map` or `retokenize`."""
    universal_match: str = TLI
    """How drafts are converted to target tokens: `tli` or `slem`."""
    universal_kv_len: int = 0
    """Maximum number of drafter tokens kept per request with `retokenize`."""
    smaller_widths: tuple[int, ...] = ()
    """The numbers of drafts per row, below k, for which decode shapes exist, in ascending order."""
    is_adaptive: bool = False
    """`enable_adaptive_verification`: whether the engine chooses how many drafts per row a step verifies."""
    synthetic_rates: tuple[float, ...] = ()
    """Probabilities for the synthetic rule: element i is that of accepting the first i + 1 drafts."""
    mask_token: int | None = None
    """The token ID that replaces unknown tokens in the drafter's input during parallel drafting. None if the checkpoint
    does not specify one."""
    block_size: int = 0
    """Number of tokens in a block drafter's block, or 0 for other drafters."""

    def __post_init__(self) -> None:
        if self.rule not in RULES:  # vLLM supports this rule, but this plugin does not
            raise UnsupportedConfigError(
                f"rejection_sample_method {self.rule} is not supported; use one of {', '.join(RULES)} in "
                "--speculative-config."
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the numbers of drafts per row for which decode shapes exist, in ascending order."""
        return (*self.smaller_widths, self.num_drafts)

    @property
    def retokenizes(self) -> bool:
        """Whether the drafter reads the text in its own tokens, which are stored on the host."""
        return self.universal and self.universal_context == RETOKENIZE

    @property
    def on_device(self) -> bool:
        """Whether drafts are generated on the device between steps, as async scheduling requires."""
        return self.needs_device and not self.retokenizes

    @property
    def needs_device(self) -> bool:
        """Whether drafting runs on the device."""
        return METHODS[self.method].on_device

    def longest(self, max_model_len: int) -> int:
        """Return the maximum length of a row's context and drafts combined."""
        # A verify step adds one token besides its drafts, and this token may take the model's last position.
        longest = max_model_len - 1
        # A drafter with its own tokens has its own limit, which is enforced elsewhere.
        if self.retokenizes or self.drafter_max_len is None:
            return longest
        return min(longest, self.drafter_max_len)

    def get_drafting_end(self, max_model_len: int) -> int:
        """Return the context length at which a row stops drafting."""
        longest = self.longest(max_model_len)
        if not self.block_size:
            return longest
        # A block begins with the newest token, and the drafter needs a position for each token in the block.
        return min(longest, min(self.drafter_max_len or max_model_len, max_model_len) + 2 - self.block_size)

    @property
    def keeps_probs(self) -> bool:
        """Whether the rule reads the distributions from which drafts were sampled."""
        return self.drafting == "probabilistic" and RULES[self.rule].needs_probs

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> Speculation | None:
        """Return the speculation settings from a configuration, or None without speculation."""
        spec_config = vllm_config.speculative_config
        if spec_config is None:
            return None
        rule, drafting = spec_config.rejection_sample_method, spec_config.draft_sample_method
        if rule == "probabilistic":
            rule, drafting = "standard", "probabilistic"
        longest = spec_config.max_model_len
        if has_model(spec_config.method):
            longest = spec_config.draft_model_config.max_model_len
        options = Options.from_vllm(vllm_config)
        universal, context = getattr(spec_config, IS_UNIVERSAL, False), options.universal_context or MAP
        return cls(
            method=spec_config.method,
            num_drafts=spec_config.num_speculative_tokens,
            rule=rule,
            drafting=drafting,
            drafter_max_len=longest,
            universal=universal,
            universal_context=context,
            universal_match=options.universal_match or TLI,
            universal_kv_len=_choose_drafter_kv_len(vllm_config, options) if universal and context == RETOKENIZE else 0,
            smaller_widths=_list_smaller_widths(spec_config, vllm_config.scheduler_config.max_num_seqs),
            is_adaptive=spec_config.enable_adaptive_verification,
            synthetic_rates=tuple(spec_config.synthetic_acceptance_rates or ()),
            mask_token=find_mask_token(spec_config),
            block_size=_count_block_tokens(spec_config),
        )


_GOLDEN_RATIO = (1 + 5**0.5) / 2


def _list_smaller_widths(spec_config: SpeculativeConfig, max_rows: int) -> tuple[int, ...]:
    """Return the numbers of drafts per row between 1 and k - 1 that a step may verify.

    Adaptive verification chooses among numbers of positions per row that grow by the golden ratio. Every number
    needs its own graphs, so there should be few. With powers of two, however, the best number would often be far from
    every available one.
    """
    num_drafts = spec_config.num_speculative_tokens
    schedule = spec_config.num_speculative_tokens_per_batch_size or ()
    widths = {scheduled for first, _, scheduled in schedule if first <= max_rows}
    num_positions = 1 + num_drafts
    while spec_config.enable_adaptive_verification and num_positions > 2:
        num_positions = round(num_positions / _GOLDEN_RATIO)
        widths.add(num_positions - 1)
    return tuple(sorted(width for width in widths if 0 < width < num_drafts))


# Names of the mask token in checkpoints, in this order: speculators and DFlash, PARD, P-EAGLE, DSpark.
_MASK_TOKEN_NAMES = ("mask_token_id", "pard_token", "ptd_token_id", "dspark_noise_token_id")


def find_mask_token(spec_config: SpeculativeConfig) -> int | None:
    """Return the ID of a parallel drafter's mask token, or None."""
    if not (spec_config.parallel_drafting and has_model(spec_config.method)):
        return None
    config = spec_config.draft_model_config.hf_config
    found = vars(config) | (getattr(config, "dflash_config", None) or {})
    return next((int(found[name]) for name in _MASK_TOKEN_NAMES if found.get(name) is not None), None)


def count_mtp_layers(spec_config: SpeculativeConfig) -> int:
    """Return the number of MTP layers in a checkpoint, or 1 if the checkpoint does not specify it.

    vLLM's `n_predict` is not set for GLM-OCR, which stores the number of layers in the text model's configuration.
    """
    config = spec_config.draft_model_config.hf_config
    text_config = getattr(config, "text_config", None)
    return getattr(config, "n_predict", None) or getattr(text_config, "num_nextn_predict_layers", None) or 1


def _count_block_tokens(spec_config: SpeculativeConfig) -> int:
    """Return the number of tokens in a block, or 0 for drafters other than block drafters."""
    method = METHODS.get(spec_config.method)
    if method is None or not method.fills_block:
        return 0
    config = spec_config.draft_model_config.hf_config
    predicts_from_newest = method.predicts_from_newest and getattr(config, "sample_from_anchor", True)
    return int(spec_config.num_speculative_tokens) + (0 if predicts_from_newest else 1)


def _choose_drafter_kv_len(vllm_config: VllmConfig, options: Options) -> int:
    """Return the maximum number of drafter tokens kept per request.

    A text may have more drafter tokens than target tokens, but vLLM limits the drafter's context to the target's.
    """
    spec_config = vllm_config.speculative_config
    model = spec_config.draft_model_config
    max_len = spec_config.max_model_len or getattr(model.hf_text_config, "max_position_embeddings", model.max_model_len)
    default = min(_DEFAULT_KV_LEN, 2 * get_target_config(vllm_config).max_model_len)
    return int(min(options.universal_kv_len or default, max_len))

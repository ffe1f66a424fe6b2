"""What users configure through vLLM: its `speculative_config`, and `additional_config["gaudi_spec"]`."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.methods import METHODS, RULES, has_model

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


ADDITIONAL_CONFIG_KEY = "gaudi_spec"


class UnsupportedConfigError(ValueError):
    """The user asked for something that this platform cannot do; the message names the option to change.

    Inside vLLM's configurations pydantic catches it, and `upstream.raise_refusals_unchanged` raises it again.
    """


class UnusableInstallationError(UnsupportedConfigError):
    """vLLM cannot run here, whatever is asked of it; the message has the remedy, and a traceback would add nothing."""


def in_one_line(error: BaseException) -> str:
    """An error as one line, for the last line that a user reads."""
    details = getattr(error, "errors", None)  # pydantic's own list of what failed
    if callable(details):
        message = "; ".join(": ".join([*map(str, item["loc"]), item["msg"]]) for item in details())
    else:
        message = str(error)
    return " ".join(message.split()) or type(error).__name__


OTHER_MODEL = "use a model in bfloat16 or float16"
"""What is left where a quantized checkpoint is not read."""


def pickled_weights(model: str, file: str | Path) -> str:
    """Why pickled weights are not read."""
    return (
        f"The weights of {model} are pickles ({Path(file).name}), and reading a pickle runs code in it; "
        "give a folder with *.safetensors (see SECURITY.md for how to make them)."
    )


REFUSED_ADAPTER = "cannot be served"
"""In every message about a LoRA adapter that is wrong in itself. Errors reach the server as texts."""


def read_named_file(path: str | Path) -> str:
    """The text of a file that an option names. OSError if it is not a plain file: a device or a pipe may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return Path(path).read_text()


def ranks_in_step(vllm_config: VllmConfig, model: ModelConfig | None = None) -> int:
    """How many data-parallel ranks run each forward together: 1 without experts. `model`: a head, where that
    is not the configuration's."""
    parallel, model = vllm_config.parallel_config, model or vllm_config.model_config
    return parallel.data_parallel_size if model is not None and model.is_moe else 1


def target_of(vllm_config: VllmConfig) -> ModelConfig:
    """The target's model. In the drafter's copy of a configuration, `model_config` is the drafter."""
    spec_config = vllm_config.speculative_config
    target = None if spec_config is None else spec_config.target_model_config
    return target or vllm_config.model_config  # n-gram, suffix and custom drafters can be configured without


def needs_batch_invariance(vllm_config: VllmConfig, model: ModelConfig | None = None) -> bool:
    """Return whether a model must compute every row independently of the batch. `model`: as in `ranks_in_step`.

    A draft model need not: its drafts are verified, so its rounding never reaches the output.
    """
    is_target = (model or vllm_config.model_config) is target_of(vllm_config)
    return is_target and Options.from_vllm(vllm_config).batch_invariant


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user can set under `additional_config["gaudi_spec"]`.

    None means the device's default.
    """

    batch_buckets: tuple[int, ...] | None = None
    """Decode batch sizes; each decode step is padded up to one of these."""
    prefill_buckets: tuple[int, ...] | None = None
    """Prompt chunk lengths; each chunk is padded up to one of these."""
    block_buckets: tuple[int, ...] | None = None
    """Blocks of KV in all rows of a decode, on devices that list them; each decode is padded up to one of these."""
    bucket_strategy: str | None = None
    """How lists that are not configured are made: `exponential`, or `linear`."""
    buckets_file: str | None = None
    """A JSON file with lists by name: batch, prefill, blocks."""
    prefill_rows: tuple[int, ...] | None = None
    """How many prompt chunks of one length may share a step."""
    warmup_tokens: int | None = None
    """Shapes of up to this many tokens are run during warm-up, larger ones only listed. -1 runs them all."""
    universal_context: str | None = None
    """How a drafter with another vocabulary reads: `map`, id by id, or `retokenize`, the text in its own tokens."""
    universal_match: str | None = None
    """How its drafts become the target's tokens: `tli`, only tokens of both vocabularies are drafted, or `slem`, all of
    its tokens are, and their text is tokenized again."""
    universal_kv_len: int | None = None
    """For `retokenize`: how many of its own tokens the drafter keeps for each request."""
    adaptive: bool = False
    """Requests whose drafts are seldom accepted draft less."""
    goodput: bool = False
    """Batches draft only while that is faster than decoding without drafts."""
    state_snapshots: int | None = None
    """For models with recurrent layers: how many of their states the prefix cache keeps."""
    audit_every: int = 0
    """One in so many requests is decoded again without drafts in idle steps, and compared; 0: none."""
    cpu_weights: str | None = None
    """On a CPU, in which format linear weights are kept: `float32`, `float16`, or `int8`. Without a choice float32, and
    for small steps a float16 copy of each matrix that is the same in both."""
    weight_kernels: str | None = None
    """How quantized checkpoints are computed with: `reference`, dequantized while they are read, or `native`, by the
    device's kernels for their format. Without a choice native where there are such kernels."""
    batch_invariant: bool = False
    """Compute each position of a request bit for bit alike, however many rows and positions share its step."""
    draft_quant_config: str | None = None
    """The drafter's quantization file, as QUANT_CONFIG of the environment is the target's."""
    fp8_range: str | None = None
    """Where FP8 is simulated, the range of e4m3: `gaudi2`, up to 240, or `gaudi3`, up to 448."""

    @property
    def adapts_num_drafts(self) -> bool:
        """Whether the number of drafts depends on how earlier ones did."""
        return self.adaptive or self.goodput

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> Options:
        every = _object(vllm_config.additional_config, "additional_config")
        requested = _object(every.get(ADDITIONAL_CONFIG_KEY))
        names = [f.name for f in fields(cls)]
        for key in every:
            if meant := _meant(key, names):
                raise UnsupportedConfigError(f"additional_config has no {shown(key)}; did you mean {meant}?")
        if unknown := [name for name in requested if name not in names]:
            raise UnsupportedConfigError(
                f"additional_config.{ADDITIONAL_CONFIG_KEY} has unknown option(s) {shown(unknown)}; "
                f"known are {', '.join(names)}."
            )
        return cls(**{name: _READ.get(name, bucket_list)(name, value) for name, value in requested.items()})


def _meant(key: str, options: list[str]) -> str | None:
    """What a key of `additional_config` beside ours was probably meant to be."""
    if key in options:
        return f"additional_config.{ADDITIONAL_CONFIG_KEY}.{key}"
    if key != ADDITIONAL_CONFIG_KEY and get_close_matches(str(key).lower(), [ADDITIONAL_CONFIG_KEY]):
        return ADDITIONAL_CONFIG_KEY
    return None


def shown(value: Any) -> str:
    """A user's value in a message: on one line, and cut to a bounded length."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


_MAX_SHOWN = 100


def _object(value: Any, name: str = f"additional_config.{ADDITIONAL_CONFIG_KEY}") -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UnsupportedConfigError(f"{name} must be an object with options by name, got {shown(value)}.")
    return value


def _one_of(*values: str) -> Callable[[str, Any], str]:
    def read(name: str, value: Any) -> str:
        if value not in values:
            raise UnsupportedConfigError(
                f"additional_config.{ADDITIONAL_CONFIG_KEY}.{name} must be {' or '.join(values)}, got {shown(value)}."
            )
        return str(value)

    return read


def _positive(name: str, value: Any) -> int:
    if _integer(name, value) < 1:
        raise UnsupportedConfigError(
            f"additional_config.{ADDITIONAL_CONFIG_KEY}.{name} must be 1 or more, got {shown(value)}."
        )
    return int(value)


def _count(name: str, value: Any) -> int:
    if _integer(name, value) < 0:
        raise UnsupportedConfigError(
            f"additional_config.{ADDITIONAL_CONFIG_KEY}.{name} must be 0 or more, got {shown(value)}."
        )
    return int(value)


def _count_or_all(name: str, value: Any) -> int:
    if _integer(name, value) < -1:
        raise UnsupportedConfigError(
            f"additional_config.{ADDITIONAL_CONFIG_KEY}.{name} must be -1, for all, or more, got {shown(value)}."
        )
    return int(value)


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnsupportedConfigError(
            f"additional_config.{ADDITIONAL_CONFIG_KEY}.{name} must be an integer, got {shown(value)}."
        )
    return value


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UnsupportedConfigError(
            f"additional_config.{ADDITIONAL_CONFIG_KEY}.{name} must be true or false, got {shown(value)}."
        )
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise UnsupportedConfigError(
            f"additional_config.{ADDITIONAL_CONFIG_KEY}.{name} must be a text, got {shown(value)}."
        )
    return value


def bucket_list(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not value or not all(type(v) is int and v > 0 for v in value):
        raise UnsupportedConfigError(
            f"additional_config.{ADDITIONAL_CONFIG_KEY}.{name} must be a list of positive integers, got {shown(value)}."
        )
    return tuple(sorted(set(value)))


EXPONENTIAL, LINEAR = "exponential", "linear"
MAP, RETOKENIZE = "map", "retokenize"
TLI, SLEM = "tli", "slem"
FLOAT32, FLOAT16, INT8 = "float32", "float16", "int8"
FP8_KV = "fp8_e4m3"
"""vLLM's name of the one --kv-cache-dtype that is not the model's; its other names for e4m3 become this."""
REFERENCE, NATIVE = "reference", "native"
GAUDI2, GAUDI3 = "gaudi2", "gaudi3"
E4M3_MAX = {GAUDI2: 240.0, GAUDI3: 448.0}
"""The largest e4m3 number of each Gaudi. Gaudi 2 keeps the highest exponent for infinities, as IEEE numbers do."""
GAUDIS = tuple(E4M3_MAX)
# Readers of options that are not lists of buckets.
_READ: dict[str, Callable[[str, Any], Any]] = {
    "warmup_tokens": _count_or_all,
    "bucket_strategy": _one_of(EXPONENTIAL, LINEAR),
    "buckets_file": _text,
    "universal_context": _one_of(MAP, RETOKENIZE),
    "universal_match": _one_of(TLI, SLEM),
    "universal_kv_len": _positive,
    "adaptive": _switch,
    "goodput": _switch,
    "audit_every": _count,
    "state_snapshots": _positive,
    "cpu_weights": _one_of(FLOAT32, FLOAT16, INT8),
    "weight_kernels": _one_of(REFERENCE, NATIVE),
    "batch_invariant": _switch,
    "draft_quant_config": _text,
    "fp8_range": _one_of(*GAUDIS),
}

MAX_DRAFTS = 16
"""The most drafts of a request in one step."""

# Per request. The first two are the limits of upstream's GPU sampler for logit_bias and bad_words.
MAX_LOGIT_EDITS = 1024
"""One for each biased token, each spelling of a bad word, and each end token that min_tokens holds back."""
MAX_BAD_WORD_TOKENS = 1024
"""In all spellings of all bad words."""
MAX_BAD_WORD_TEXT = 16 * MAX_BAD_WORD_TOKENS
"""Characters, so that a text that has too many tokens is refused before it is tokenized."""
MAX_CONSTRAINT_TEXT = 256 * 1024
"""Characters of a JSON schema, regex, grammar or list of choices. Larger ones take seconds to compile and more than
64 MiB, at the expense of other requests."""

REQUEST_OPTION = "num_speculative_tokens"
"""In a request's `extra_args`, which is `vllm_xargs` over HTTP: its maximum number of drafts in a step, 0 for none."""


UNIVERSAL_DRAFT = "universal_draft"
"""Our method name for vLLM's `draft_model` with another vocabulary than the target's."""
_DEFAULT_KV_LEN = 2048
IS_UNIVERSAL = "gaudi_spec_universal_draft"
"""The attribute by which upstream/ marks a configuration of vLLM's with that method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The parts of vLLM's `speculative_config` that the runner needs."""

    method: str
    num_drafts: int
    """k: the most tokens drafted for a row in a step."""
    rule: str
    """`rejection_sample_method`, one of `RULES`."""
    drafting: str
    """`draft_sample_method`: greedy (a drafter's best token; n-grams and suffixes too), probabilistic, coupled."""
    drafter_max_len: int | None
    """The drafter sees no position from this on."""
    universal: bool = False
    """The drafter has a vocabulary of its own."""
    universal_context: str = MAP
    """How it reads the context: `map` or `retokenize`."""
    universal_match: str = TLI
    """How its drafts become the target's tokens: `tli` or `slem`."""
    universal_kv_len: int = 0
    """For `retokenize`: how many tokens it keeps for each request."""
    synthetic_rates: tuple[float, ...] = ()
    """For the synthetic rule: how often the first i + 1 drafts are all accepted."""

    def __post_init__(self) -> None:
        if self.rule not in RULES:  # a value of vLLM's that is not in RULES
            raise UnsupportedConfigError(
                f"rejection_sample_method {self.rule} is not known here; use one of {', '.join(RULES)} in "
                "--speculative-config."
            )

    @property
    def has_model(self) -> bool:
        return has_model(self.method)

    @property
    def is_head(self) -> bool:
        return METHODS[self.method].is_head

    @property
    def reads_states(self) -> bool:
        return METHODS[self.method].reads_hidden_states

    @property
    def retokenizes(self) -> bool:
        """Whether the drafter reads the text in its own tokens, which the host tracks."""
        return self.universal and self.universal_context == RETOKENIZE

    @property
    def on_device(self) -> bool:
        """Whether drafts are made on the device, between two steps: only then is async scheduling possible."""
        return self.needs_device and not self.retokenizes

    @property
    def needs_device(self) -> bool:
        """Whether rounds of drafts run on the device, whoever starts them."""
        return METHODS[self.method].on_device

    def longest(self, max_model_len: int) -> int:
        """The length that a row's context and its drafts may reach together."""
        # A verify step adds its drafts and one token more, which may be the model's last.
        longest = max_model_len - 1
        # A drafter that counts in its own tokens has its own limit.
        if self.retokenizes or self.drafter_max_len is None:
            return longest
        return min(longest, self.drafter_max_len)

    @property
    def keeps_probs(self) -> bool:
        """Whether the rule reads the distributions that drafts were drawn from."""
        return self.drafting == "probabilistic" and RULES[self.rule].needs_probs

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> Speculation | None:
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
            universal_kv_len=_drafter_kv_len(vllm_config, options) if universal and context == RETOKENIZE else 0,
            synthetic_rates=tuple(spec_config.synthetic_acceptance_rates or ()),
        )


def _drafter_kv_len(vllm_config: VllmConfig, options: Options) -> int:
    """A text may have more of the drafter's tokens than of the target's, to whose context vLLM cuts the drafter's."""
    spec_config = vllm_config.speculative_config
    model = spec_config.draft_model_config
    max_len = spec_config.max_model_len or getattr(model.hf_text_config, "max_position_embeddings", model.max_model_len)
    default = min(_DEFAULT_KV_LEN, 2 * target_of(vllm_config).max_model_len)
    return int(min(options.universal_kv_len or default, max_len))

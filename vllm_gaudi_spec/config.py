"""What users say to vLLM: its `speculative_config`, and `additional_config["gaudi_spec"]`."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.drafting.table import METHODS, has_model
from vllm_gaudi_spec.sampling.rules.table import RULES

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.sampling_params import SamplingParams


ADDITIONAL_CONFIG_KEY = "gaudi_spec"


class UnsupportedConfigError(ValueError):
    """The user asked for something that this platform cannot do; the message names the option to change.

    Inside vLLM's configurations pydantic catches it, and `compat.raise_refusals_unchanged` raises it again.
    """


def pickled_weights(model: str, file: str | Path) -> str:
    """Why such weights are not read."""
    return (
        f"The weights of {model} are pickles ({Path(file).name}), and reading a pickle runs what is in it; "
        "give a folder with *.safetensors (SECURITY.md says how to make them)."
    )


REFUSED_ADAPTER = "cannot be served"
"""In every message about a LoRA adapter that is wrong in itself. Errors reach the server as texts."""


def read_named_file(path: str | Path) -> str:
    """A file that an option names. OSError if it is none: from a device or a pipe one would read for ever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return Path(path).read_text()


def ranks_in_step(vllm_config: VllmConfig, model: ModelConfig | None = None) -> int:
    """How many data-parallel ranks run each forward together: one alone, unless the model has experts. `model`: where
    that is not the configuration's own, but a head of it."""
    parallel, model = vllm_config.parallel_config, model or vllm_config.model_config
    return parallel.data_parallel_size if model is not None and model.is_moe else 1


def target_of(vllm_config: VllmConfig) -> ModelConfig:
    """The target's model. In the drafter's copy of a configuration, `model_config` is the drafter."""
    spec_config = vllm_config.speculative_config
    target = None if spec_config is None else spec_config.target_model_config
    return target or vllm_config.model_config  # n-gram, suffix and custom drafters can be configured without


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user can set under `additional_config["gaudi_spec"]`.

    None means that the device's own default is taken.
    """

    batch_buckets: tuple[int, ...] | None = None
    """Decode batch sizes; each decode step is padded up to one of these."""
    prefill_buckets: tuple[int, ...] | None = None
    """Prompt chunk lengths; each chunk is padded up to one of these."""
    block_buckets: tuple[int, ...] | None = None
    """Blocks of KV in all rows of a decode, on devices that list them; each decode is padded up to one of these."""
    bucket_strategy: str | None = None
    """How lists that are not given are made: `exponential`, or `linear`."""
    buckets_file: str | None = None
    """A JSON file with lists by name: batch, prefill, blocks."""
    prefill_rows: tuple[int, ...] | None = None
    """How many prompt chunks of one length may share a step."""
    warmup_tokens: int | None = None
    """Shapes of up to this many tokens are run during warm-up, larger ones only listed. -1 runs them all."""
    universal_context: str | None = None
    """How a drafter with another vocabulary reads: `map`, id by id, or `retokenize`, the text in its own tokens."""
    universal_match: str | None = None
    """How its drafts become the target's tokens: `tli`, only tokens of both are drafted, or `slem`, all of its own are,
    and their text is written anew."""
    universal_kv_len: int | None = None
    """For `retokenize`: how many tokens of its own the drafter can keep of each request."""
    adaptive: bool = False
    """Requests whose drafts are seldom accepted draft less."""
    goodput: bool = False
    """Batches draft only while that is faster than not to."""
    cpu_weights: str | None = None
    """On a CPU, in which format linear weights are kept: `float32`, `float16`, or `int8`. Without a choice float32, and
    for small steps a float16 copy of each matrix that is the same in both."""
    draft_quant_config: str | None = None
    """For the drafter, what the environment's QUANT_CONFIG is for the target: a quantisation file."""
    fp8_range: str | None = None
    """Where FP8 is simulated, whose e4m3 numbers: `gaudi2`, up to 240, or `gaudi3`, up to 448."""

    @property
    def adapts_num_drafts(self) -> bool:
        """Whether how much is drafted depends on what came of it."""
        return self.adaptive or self.goodput

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> Options:
        given = _object(_object(vllm_config.additional_config, "additional_config").get(ADDITIONAL_CONFIG_KEY))
        known = [f.name for f in fields(cls)]
        if unknown := [name for name in given if name not in known]:
            raise UnsupportedConfigError(
                f"additional_config.{ADDITIONAL_CONFIG_KEY} has unknown option(s) {shown(unknown)}; "
                f"known are {', '.join(known)}."
            )
        return cls(**{name: _READ.get(name, bucket_list)(name, value) for name, value in given.items()})


def shown(value: Any) -> str:
    """What a user gave, as a message repeats it: on one line, and not at any length."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


_MOST_SHOWN = 100


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
GAUDI2, GAUDI3 = "gaudi2", "gaudi3"
E4M3_MAX = {GAUDI2: 240.0, GAUDI3: 448.0}
"""The largest e4m3 number of each Gaudi. Gaudi 2 keeps the highest exponent for infinities, as IEEE numbers do."""
GAUDIS = tuple(E4M3_MAX)
# How options are read that are not lists of buckets.
_READ: dict[str, Callable[[str, Any], Any]] = {
    "warmup_tokens": _integer,
    "bucket_strategy": _one_of(EXPONENTIAL, LINEAR),
    "buckets_file": _text,
    "universal_context": _one_of(MAP, RETOKENIZE),
    "universal_match": _one_of(TLI, SLEM),
    "universal_kv_len": _positive,
    "adaptive": _switch,
    "goodput": _switch,
    "cpu_weights": _one_of(FLOAT32, FLOAT16, INT8),
    "draft_quant_config": _text,
    "fp8_range": _one_of(*GAUDIS),
}

MAX_DRAFTS = 16
"""The most drafts of a request in one step."""

# Logit rules of a request: one for each biased token, each spelling of a bad word, and each end token that min_tokens
# holds back. The table grows where that makes no new program; elsewhere it is this large, and more is refused.
NUM_LOGIT_EDITS, EDIT_PREFIX = 64, 8
MAX_LOGIT_EDITS, MAX_EDIT_PREFIX = 320, 16

REQUEST_OPTION = "num_speculative_tokens"
"""In a request's `extra_args`, which is `vllm_xargs` over HTTP: the most drafts it wants in a step, 0 for none."""


def requested_drafts(params: SamplingParams, most: int) -> int:
    """How many of the `most` drafts a request wants in a step."""
    return min((params.extra_args or {}).get(REQUEST_OPTION, most), most)


def last_use(num_prompt: int, max_tokens: int) -> int:
    """The length from which on a request has no use for drafts: one more token is its last."""
    return num_prompt + max_tokens - 1


UNIVERSAL_DRAFT = "universal_draft"
"""A method of ours: vLLM's `draft_model` with a vocabulary of its own."""
_DEFAULT_SLAB = 2048
IS_UNIVERSAL = "gaudi_spec_universal_draft"
"""How compat/ marks vLLM's configuration when it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What vLLM's `speculative_config` says, as far as the runner needs it."""

    method: str
    num_drafts: int
    """k: the most tokens drafted for a row in a step."""
    rule: str
    """`rejection_sample_method`, one of `sampling/rules/table.py`."""
    drafting: str
    """`draft_sample_method`: greedy (a drafter's best token; n-grams and suffixes too), probabilistic, coupled."""
    drafter_max_len: int | None
    """No drafter sees a position at or past this."""
    universal: bool = False
    """The drafter has a vocabulary of its own."""
    universal_context: str = MAP
    """How it reads then: `map` or `retokenize`."""
    universal_match: str = TLI
    """How its drafts become the target's tokens: `tli` or `slem`."""
    universal_kv_len: int = 0
    """For `retokenize`: how many tokens it keeps of each request."""
    synthetic_rates: tuple[float, ...] = ()
    """For the synthetic rule: how often the first i + 1 drafts are all accepted."""

    def __post_init__(self) -> None:
        if self.rule not in RULES:  # a value of vLLM's that has no row here
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
        """Whether the drafter reads the text in its own tokens, which the host keeps."""
        return self.universal and self.universal_context == RETOKENIZE

    @property
    def on_device(self) -> bool:
        """Whether drafts are made on the device, between two steps: only then may steps overlap."""
        return METHODS[self.method].on_device and not self.retokenizes

    def longest(self, max_model_len: int) -> int:
        """The length that a row's context and its drafts may reach together."""
        # A verify step adds its drafts and one token more, which may be the model's last.
        most = max_model_len - 1
        # A drafter that counts in its own tokens has its limit there.
        own = None if self.retokenizes else self.drafter_max_len
        return most if own is None else min(most, own)

    @property
    def keeps_probs(self) -> bool:
        """Whether the rule looks at the laws that drafts were drawn from."""
        return self.drafting == "probabilistic" and RULES[self.rule].needs_probs

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> Speculation | None:
        given = vllm_config.speculative_config
        if given is None:
            return None
        rule, drafting = given.rejection_sample_method, given.draft_sample_method
        if rule == "probabilistic":
            rule, drafting = "standard", "probabilistic"
        longest = given.max_model_len
        if has_model(given.method):
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
            universal_context=context,
            universal_match=options.universal_match or TLI,
            universal_kv_len=_slab(vllm_config, options) if universal and context == RETOKENIZE else 0,
            synthetic_rates=tuple(given.synthetic_acceptance_rates or ()),
        )


def _slab(vllm_config: VllmConfig, options: Options) -> int:
    """A text may have more of the drafter's tokens than of the target's, to whose context vLLM cuts the drafter's."""
    given = vllm_config.speculative_config
    model = given.draft_model_config
    own = given.max_model_len or getattr(model.hf_text_config, "max_position_embeddings", model.max_model_len)
    default = min(_DEFAULT_SLAB, 2 * target_of(vllm_config).max_model_len)
    return int(min(options.universal_kv_len or default, own))

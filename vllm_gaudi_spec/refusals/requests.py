"""Checks that reject individual requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_gaudi_spec.config import (
    MAX_BAD_WORD_TEXT,
    MAX_BAD_WORD_TOKENS,
    MAX_CONSTRAINT_TEXT,
    MAX_LOGIT_EDITS,
    REQUEST_OPTION,
    shown,
)
from vllm_gaudi_spec.sampling.logit_edits import count_edits

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


_NO_PROMPT: Mapping[str, Any] = {}


def check_logit_edits(params: SamplingParams) -> str | None:
    """Return the reason to reject a request's logit edits, or None.

    Before bad words are tokenized, only their characters are counted. End tokens are counted once vLLM has added them.
    """
    num_characters = sum(map(len, params.bad_words or ()))
    if num_characters > MAX_BAD_WORD_TEXT:
        return f"bad_words have {num_characters} characters; use at most {MAX_BAD_WORD_TEXT} per request."
    num_edits, num_tokens = count_edits(params)
    if num_tokens > MAX_BAD_WORD_TOKENS:
        return (
            f"bad_words have {num_tokens} tokens, counted with and without a space before each word; use at most "
            f"{MAX_BAD_WORD_TOKENS} per request."
        )
    if num_edits > MAX_LOGIT_EDITS:
        return (
            f"logit_bias, bad_words and the stop tokens of min_tokens make {num_edits} logit edits; use at most "
            f"{MAX_LOGIT_EDITS} per request."
        )
    return None


def check_constraint_size(params: SamplingParams) -> str | None:
    """Return the reason why compiling a request's structured output would delay other requests too long, or None."""
    constraint = params.structured_outputs
    if constraint is None:
        return None
    for name in ("json", "regex", "choice", "grammar", "structural_tag"):
        value = getattr(constraint, name)
        num_characters = len(value if isinstance(value, str) else json.dumps(value))
        if num_characters > MAX_CONSTRAINT_TEXT:
            return f"structured_outputs.{name} has {num_characters} characters; use at most {MAX_CONSTRAINT_TEXT}."
    return None


def _check_serializable(params: Mapping[str, object]) -> str | None:
    """Return the reason why a request cannot be sent to the engine, or None.

    JSON may contain lone surrogates and integers of any size, for which vLLM's front end would report a server error.
    """
    for name, value in params.items():
        try:
            msgspec.msgpack.encode(value)
        except UnicodeEncodeError:
            return f"{name} has a lone surrogate (\\ud800 to \\udfff), which is not a character; leave it out."
        except OverflowError:
            return f"{name} has an integer of more than 64 bits; use a smaller one."
        except TypeError:
            continue  # this is a Python object, so the request did not arrive over HTTP
    return None


def check_request(params: SamplingParams, *, prompt: Mapping[str, Any] = _NO_PROMPT) -> str | None:
    """Return the reason why a request cannot be served, or None. `prompt` is the output of vLLM's renderer."""
    fields = {name: value for name in params.__struct_fields__ if (value := getattr(params, name)) is not None}
    if reason := _check_serializable(fields | {"cache_salt": prompt.get("cache_salt")}):
        return reason
    if reason := check_logit_edits(params):
        return reason
    if params.prompt_logprob_token_ids is not None:
        return "prompt_logprob_token_ids is not supported by this platform; use prompt_logprobs."
    num_drafts = (params.extra_args or {}).get(REQUEST_OPTION, 0)
    if not isinstance(num_drafts, int) or isinstance(num_drafts, bool) or num_drafts < 0:
        return f"{REQUEST_OPTION} in vllm_xargs (extra_args) must be an integer, 0 or more, got {shown(num_drafts)}."
    return None

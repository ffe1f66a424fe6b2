"""Refusals of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_gaudi_spec.config import MAX_LOGIT_EDITS, REQUEST_OPTION, shown

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


_NO_PROMPT: Mapping[str, Any] = {}
# Guess for a model, its own stop token included.
_MOST_END_TOKENS = 8


def _too_many_logit_edits(params: SamplingParams) -> str | None:
    """Upper bounds: vLLM validates a request before it tokenizes bad words and adds the model's end tokens."""
    num_spellings = 2 * len(params.bad_words or ())  # with and without a space before each word
    stops = len(params.stop_token_ids or ()) + _MOST_END_TOKENS if params.min_tokens else 0
    num_edits = len(params.logit_bias or {}) + num_spellings + stops
    if num_edits <= MAX_LOGIT_EDITS:
        return None
    return (
        f"logit_bias, bad_words and the stop tokens of min_tokens make up to {num_edits} logit edits; use at most "
        f"{MAX_LOGIT_EDITS} per request on this device."
    )


def _not_serializable(params: Mapping[str, object]) -> str | None:
    """JSON may hold halves of characters, and integers of any size. Without this refusal vLLM's front end fails when it
    sends one to the engine, and the answer is a server error."""
    for name, value in params.items():
        try:
            msgspec.msgpack.encode(value)
        except UnicodeEncodeError:
            return f"{name} has a lone surrogate (\\ud800 to \\udfff), which is not a character; leave it out."
        except OverflowError:
            return f"{name} has an integer of more than 64 bits; use a smaller one."
        except TypeError:
            continue  # a Python object, which no request over HTTP has
    return None


def unsupported_request(
    params: SamplingParams, *, fixed_tables: bool, prompt: Mapping[str, Any] = _NO_PROMPT
) -> str | None:
    """Why a request cannot be served, or None. `fixed_tables`: the device's graphs have room for MAX_LOGIT_EDITS.
    `prompt`: as vLLM's renderer leaves it."""
    fields = {name: value for name in params.__struct_fields__ if (value := getattr(params, name)) is not None}
    if reason := _not_serializable(fields | {"cache_salt": prompt.get("cache_salt")}):
        return reason
    if "prompt_embeds" in prompt.get("mm_placeholders", ()):
        return "prompt_embeds are not supported beside images, video and sound; leave one of them out."
    if "prompt_embeds" in prompt and params.prompt_logprobs is not None:
        return "There are no prompt_logprobs of embeddings; leave prompt_logprobs out."
    if fixed_tables and (reason := _too_many_logit_edits(params)):
        return reason
    if params.thinking_token_budget is not None:
        return "thinking_token_budget is not supported by this platform; leave it out."
    if params.prompt_logprob_token_ids is not None:
        return "prompt_logprob_token_ids is not supported by this platform; use prompt_logprobs."
    num_drafts = (params.extra_args or {}).get(REQUEST_OPTION, 0)
    if not isinstance(num_drafts, int) or isinstance(num_drafts, bool) or num_drafts < 0:
        return f"{REQUEST_OPTION} in vllm_xargs (extra_args) must be an integer, 0 or more, got {shown(num_drafts)}."
    return None

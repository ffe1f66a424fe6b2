"""Which requests are not served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from vllm_gaudi_spec.config import MAX_LOGIT_EDITS, REQUEST_OPTION, shown

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


# Of a model, its own stop token included.
_MOST_END_TOKENS = 8


def _too_many_logit_edits(params: SamplingParams) -> str | None:
    """vLLM asks before it spells bad words in tokens and adds the model's end tokens: hence the guesses."""
    num_spellings = 2 * len(params.bad_words or ())  # with and without a space before each word
    stops = len(params.stop_token_ids or ()) + _MOST_END_TOKENS if params.min_tokens else 0
    wanted = len(params.logit_bias or {}) + num_spellings + stops
    if wanted <= MAX_LOGIT_EDITS:
        return None
    return (
        f"logit_bias, bad_words and stop tokens that min_tokens holds back make up to {wanted} logit edits; this "
        f"device has room for {MAX_LOGIT_EDITS} a request."
    )


def _not_sent(given: Mapping[str, object]) -> str | None:
    """JSON can name halves of characters, and integers of any size. vLLM's front end fails when it sends one to the
    engine, and answers with an error of the server's."""
    for name, value in given.items():
        try:
            msgspec.msgpack.encode(value)
        except UnicodeEncodeError:
            return f"{name} has a lone surrogate (\\ud800 to \\udfff), which is no character; leave it out."
        except OverflowError:
            return f"{name} has an integer of more than 64 bits; use a smaller one."
        except TypeError:
            continue  # an object of Python's own, which no request over HTTP has
    return None


def unsupported_request(params: SamplingParams, *, fixed_tables: bool, cache_salt: str | None = None) -> str | None:
    """Why a request cannot be served, or None. `fixed_tables`: its graphs have room for so many logit edits."""
    given = {name: value for name in params.__struct_fields__ if (value := getattr(params, name)) is not None}
    if reason := _not_sent(given | {"cache_salt": cache_salt}):
        return reason
    if fixed_tables and (reason := _too_many_logit_edits(params)):
        return reason
    if params.thinking_token_budget is not None:
        return "thinking_token_budget is not supported by this platform; leave it out."
    if params.prompt_logprob_token_ids is not None:
        return "prompt_logprob_token_ids is not supported by this platform; use prompt_logprobs."
    wanted = (params.extra_args or {}).get(REQUEST_OPTION, 0)
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 0:
        return f"{REQUEST_OPTION} in vllm_xargs (extra_args) must be an integer, 0 or more, got {shown(wanted)}."
    return None

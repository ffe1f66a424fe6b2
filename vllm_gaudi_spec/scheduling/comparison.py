"""Comparison of a finished request's output with the output of the same request without drafts.

A comparison is a generator that yields requests to run without drafts, receives their results, and returns an outcome.
A comparison can be closed at any time and started again.

Comparisons work for the strict acceptance rule, and for every rule at temperature 0. In these cases, decoding generates
the same tokens with and without drafts, except for ties.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.logger import init_logger

from vllm_gaudi_spec import metrics
from vllm_gaudi_spec.config import ADDITIONAL_CONFIG_KEY, REQUEST_OPTION, Speculation
from vllm_gaudi_spec.device_table import describe_device
from vllm_gaudi_spec.environment import cache_folder, cached_files
from vllm_gaudi_spec.versions import installed, installed_vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

    from vllm_gaudi_spec.upstream.scheduler import BlockHash, Request

logger = init_logger(__name__)


class Finished(NamedTuple):
    """The data that an audit needs about a finished request."""

    prompt: list[int]
    outputs: list[int]
    params: SamplingParams
    cache_salt: str | None = None
    block_hasher: Callable[[Request], list[BlockHash]] | None = None


class Job(NamedTuple):
    """A request to run without drafts."""

    prompt: list[int]
    params: SamplingParams


class Result(NamedTuple):
    tokens: list[int]
    scores: dict[int, float]
    """Scores of the tokens in `logprob_token_ids` at the first position."""


@dataclass(frozen=True)
class Difference:
    """The first difference between the outputs with and without drafts."""

    finished: Finished
    without_drafts: list[int]
    position: int
    """Index into the output tokens."""
    scores: dict[int, float]
    """Scores of both candidates at that position, if both outputs have a token there."""


class Outcome(NamedTuple):
    kind: str
    """One of `metrics.AUDIT_RESULTS`."""
    difference: Difference | None = None


Comparison = Generator[list[Job], list[Result], Outcome]

TIES = {torch.float32: 1e-4, torch.float16: 0.0625, torch.bfloat16: 0.5}
"""Maps the model's dtype to the maximum difference at which two logits, including their noise, count as tied. For the
16-bit dtypes, this is four times the spacing of representable numbers between 16 and 32."""


def compare_tokens(finished: Finished, tolerance: float) -> Comparison:
    """Run the request again with its original noise, and expect the same tokens up to the first tie."""
    length = len(finished.outputs)
    (again,) = yield [Job(finished.prompt, _audit_params(finished.params, max_tokens=length))]
    position = find_first_difference(finished.outputs, again.tokens)
    if position is None:
        return Outcome(metrics.IDENTICAL)
    if position == min(length, len(again.tokens)):  # only one of the outputs has ended, which rounding cannot explain
        return Outcome(metrics.DIFFERENT, Difference(finished, again.tokens, position, {}))
    pair = finished.outputs[position], again.tokens[position]
    prompt = finished.prompt + finished.outputs[:position]
    # The candidates are tied if the first one wins with its logit raised by the tolerance and loses with it lowered.
    raised, lowered = yield [
        Job(prompt, _params_between(finished, position, pair, raised_by)) for raised_by in (tolerance, -tolerance)
    ]
    kind = metrics.TIE if (raised.tokens[0], lowered.tokens[0]) == pair else metrics.DIFFERENT
    scores = {token: raised.scores[token] for token in pair if token in raised.scores}  # padding has no scores
    return Outcome(kind, Difference(finished, again.tokens, position, scores))


def find_first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position at which two outputs differ, or None if they are equal."""
    for position, (first, second) in enumerate(zip(one, other, strict=False)):
        if first != second:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def _audit_params(params: SamplingParams, **changes: object) -> SamplingParams:
    """Return `params` with `changes` but without drafts, log-probabilities, or reuse of KV from speculative steps."""
    changed = copy.copy(params)
    quiet = dict.fromkeys(("logprobs", "prompt_logprobs", "prompt_logprob_start", "logprob_token_ids"))
    no_drafts = {**(params.extra_args or {}), REQUEST_OPTION: 0}
    for name, value in (quiet | dict(skip_reading_prefix_cache=True, extra_args=no_drafts) | changes).items():
        setattr(changed, name, value)
    return changed


def _params_between(finished: Finished, position: int, pair: tuple[int, int], raised_by: float) -> SamplingParams:
    """Return parameters for choosing between two candidates after `raised_by` is added to the logit of the first one.

    Outputs before `position` become part of the prompt, so penalties that count outputs are replaced by biases.
    """
    params = finished.params
    before = finished.outputs[:position]
    bias = {
        token: (params.logit_bias or {}).get(token, 0.0)
        - params.frequency_penalty * before.count(token)
        - params.presence_penalty * (token in before)
        for token in pair
    }
    bias[pair[0]] += raised_by
    # Both candidates have passed every filter, so no filter is needed here.
    return _audit_params(
        params,
        max_tokens=1,
        min_tokens=0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        bad_words=None,
        _bad_words_token_ids=None,
        allowed_token_ids=list(pair),
        logit_bias=bias,
        logprob_token_ids=list(pair),
    )


# --- file that records a difference ---

_PARAMS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids"),
    "bad_words_token_ids",
)
"""Sampling parameters that affect which tokens are chosen. None of these parameters contains text."""


def write_difference(
    difference: Difference, vllm_config: VllmConfig, speculation: Speculation, tolerance: float
) -> Path | None:
    """Write token IDs and options, but no text, to a file. Returns the path of the file, or None if writing failed.

    Only the user who runs the server can read the file.
    """
    text = json.dumps(_content(difference, vllm_config, speculation, tolerance), indent=1)
    try:
        folder = cached_files.make_folder(cache_folder()) / "audits"
        path = folder / f"difference-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
        cached_files.write(path, text.encode())
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        logger.warning("Cannot write the difference that an audit found to a file: %s", error)
        return None
    return path


def _content(
    difference: Difference, vllm_config: VllmConfig, speculation: Speculation, tolerance: float
) -> dict[str, object]:
    finished, position = difference.finished, difference.position
    outputs = {"with_drafts": finished.outputs, "without_drafts": difference.without_drafts}
    model = vllm_config.model_config
    return {
        "prompt_token_ids": finished.prompt,
        **outputs,
        "position": position,
        "candidates": {name: tokens[position : position + 1] for name, tokens in outputs.items()},
        "scores": {str(token): score for token, score in difference.scores.items()},
        "scores_are": model.logprobs_mode,
        "tolerance": tolerance,
        "sampling_params": {name: getattr(finished.params, name) for name in _PARAMS},
        "model": model.model,
        "dtype": str(model.dtype),
        "speculation": asdict(speculation),
        "options": (vllm_config.additional_config or {}).get(ADDITIONAL_CONFIG_KEY),
        "async_scheduling": vllm_config.scheduler_config.async_scheduling,
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        **describe_device(),
        "versions": {"vllm": installed_vllm(), **{name: installed(name) for name in ("vllm-gaudi-spec", "torch")}},
    }

"""What an audit runs of a finished request, and how it compares the two outputs.

A comparison is a generator: it yields requests to run without drafts, is sent their results, and returns an outcome.
It can be dropped at any time and begun again.

The strict rule, and every rule at temperature 0, has the tokens of decoding without drafts, up to ties: `by_token`. The
standard and block rules with probabilistic drafts keep the distribution only: `by_score`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_gaudi_spec.config import REQUEST_OPTION
from vllm_gaudi_spec.scheduling import metrics

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_gaudi_spec.upstream.scheduler import BlockHash, Request


class Finished(NamedTuple):
    """A request that has ended, as far as an audit needs it."""

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
    """Of the tokens that `logprob_token_ids` named, at the first position."""
    prompt_scores: list[float]
    """Of each prompt token but the first, where `prompt_logprobs` asked for them."""


@dataclass(frozen=True)
class Difference:
    """The first difference of two outputs."""

    finished: Finished
    without_drafts: list[int]
    position: int
    """Index among the output tokens."""
    scores: dict[int, float]
    """Of the two candidates at that position, if both outputs have a token there."""


class Outcome(NamedTuple):
    kind: str
    """One of `metrics.AUDIT_RESULTS`."""
    difference: Difference | None = None
    score_gap: float = 0.0
    """For `by_score`: how much likelier the output with drafts was than the other; its sign is a fair coin's if the
    two have the same distribution."""


Comparison = Generator[list[Job], list[Result], Outcome]

TIES = {torch.float32: 1e-4, torch.float16: 0.0625, torch.bfloat16: 0.5}
"""By the model's dtype: how near to each other two logits, with their noise, count as equal. Of the two short formats
it is four times the step between neighboring numbers from 16 to 32."""


def by_token(finished: Finished, tolerance: float) -> Comparison:
    """The request again, with its own noise: the same tokens up to the first tie."""
    length = len(finished.outputs)
    (again,) = yield [Job(finished.prompt, _plain(finished.params, max_tokens=length))]
    position = first_difference(finished.outputs, again.tokens)
    if position is None:
        return Outcome(metrics.IDENTICAL)
    if position == min(length, len(again.tokens)):  # one ended where the other goes on, which no rounding explains
        return Outcome(metrics.DIFFERENT, Difference(finished, again.tokens, position, {}))
    pair = finished.outputs[position], again.tokens[position]
    prompt = finished.prompt + finished.outputs[:position]
    # The first candidate has to win when it is raised by the tolerance, and to lose when it is lowered by it.
    raised, lowered = yield [
        Job(prompt, _between(finished, position, pair, raised_by)) for raised_by in (tolerance, -tolerance)
    ]
    kind = metrics.TIE if (raised.tokens[0], lowered.tokens[0]) == pair else metrics.DIFFERENT
    scores = {token: raised.scores[token] for token in pair if token in raised.scores}  # there may be padding
    return Outcome(kind, Difference(finished, again.tokens, position, scores))


def by_score(finished: Finished, max_model_len: int) -> Comparison:
    """Another output from the same prompt, with fresh noise, and the target's mean score of both texts.

    Both are draws from one distribution if the rule is exact, so which of the two scores higher is a fair coin,
    whatever the score means. Both are scored as prompts, by the same graphs.
    """
    params = finished.params
    (again,) = yield [Job(finished.prompt, _plain(params, max_tokens=params.max_tokens, seed=None))]
    # A prompt needs room for one more token.
    longest = max_model_len - 1 - len(finished.prompt)
    texts = [tokens[:longest] for tokens in (finished.outputs, again.tokens)]
    scored = yield [
        Job(finished.prompt + text, _plain(params, max_tokens=1, prompt_logprobs=0, min_tokens=0)) for text in texts
    ]
    means = [
        sum(result.prompt_scores[-len(text) :]) / len(text) for result, text in zip(scored, texts, strict=True) if text
    ]
    if len(means) < 2:
        return Outcome(metrics.SAMPLED)
    # Long texts have steadier means, so they weigh more.
    first, second = map(len, texts)
    return Outcome(metrics.SAMPLED, score_gap=(means[0] - means[1]) * math.sqrt(first * second / (first + second)))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    for position, (first, second) in enumerate(zip(one, other, strict=False)):
        if first != second:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def _plain(params: SamplingParams, **changes: object) -> SamplingParams:
    """Without drafts, reports, or KV that a step with drafts has written."""
    changed = copy.copy(params)
    quiet = dict.fromkeys(("logprobs", "prompt_logprobs", "prompt_logprob_start", "logprob_token_ids"))
    no_drafts = {**(params.extra_args or {}), REQUEST_OPTION: 0}
    for name, value in (quiet | dict(skip_reading_prefix_cache=True, extra_args=no_drafts) | changes).items():
        setattr(changed, name, value)
    return changed


def _between(finished: Finished, position: int, pair: tuple[int, int], raised_by: float) -> SamplingParams:
    """To choose between two candidates, the first of them raised. The outputs before `position` are prompt here, so
    penalties that count outputs are written into the bias."""
    params = finished.params
    before = finished.outputs[:position]
    bias = {
        token: (params.logit_bias or {}).get(token, 0.0)
        - params.frequency_penalty * before.count(token)
        - params.presence_penalty * (token in before)
        for token in pair
    }
    bias[pair[0]] += raised_by
    # Both were inside every filter, and neither was forbidden.
    return _plain(
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


class Evidence:
    """Evidence against "the sign of each gap is a fair coin's", which may be looked at after each gap.

    For any factor f the product of exp(f * gap - (f * gap)**2 / 2) does not grow in expectation when gaps are
    symmetric, as (e**x + e**-x) / 2 <= e**(x**2 / 2). Nor does its average over normal f with variance `_SPREAD`, which
    is `ratio`. By Ville's inequality `ratio` ever exceeds 1 / a with a probability of at most a, over any number of
    gaps.
    """

    _SPREAD = 0.002

    def __init__(self) -> None:
        self._sum = self._squares = 0.0

    def add(self, gap: float) -> None:
        self._sum += gap
        self._squares += gap * gap

    @property
    def log10_ratio(self) -> float:
        spread = 1 + self._SPREAD * self._squares
        return (self._SPREAD * self._sum**2 / (2 * spread) - math.log(spread) / 2) / math.log(10)


ALARM = 3.0
"""The `log10_ratio` from which on a rule counts as biased: one false alarm in 1000 servers, however long they run."""

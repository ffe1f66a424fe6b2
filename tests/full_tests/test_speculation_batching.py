"""Whatever the sampling parameters, a request with a seed gives the tokens that it gives without speculation: alone,
in a batch, in another order, in chunks, out of the prefix cache and after preemption."""

from typing import Any

import pytest
from vllm import SamplingParams

from tests.full_tests.engines import SMALL_KV, engine, preemptions
from tests.full_tests.prompts import random_prompts
from tests.full_tests.speculation import METHODS, accepted, ngram, speculating
from tests.full_tests.tiny_models import VOCAB
from tests.full_tests.workload import Answer, Request, differences, mixed_requests, run_alone, run_together

UNCACHED = dict(enable_prefix_caching=False)
# The tiny Llama takes 1 KiB of KV per token: this is room for about two of the longest requests.
CHUNKED = dict(max_num_batched_tokens=64)

# What a user may ask for at a temperature, each beside top-p.
SAMPLING: list[dict[str, Any]] = [
    {},
    dict(top_k=20),
    dict(min_p=0.05),
    dict(presence_penalty=0.8, frequency_penalty=0.4),
    dict(repetition_penalty=1.2),
    dict(logit_bias={5: 4.0, 9: -100.0, 77: 2.5}),
    dict(bad_words=["the", " a", "e"]),
    dict(allowed_token_ids=list(range(20, 60))),
    dict(min_tokens=30, logit_bias={1: 6.0}),
    dict(top_k=10, min_p=0.02, repetition_penalty=0.8),
    dict(n=2, top_k=8),
    dict(stop=["e", "qu"], min_tokens=8),
]


def repeating(length: int, seed: int) -> list[int]:
    """Seven tokens over and over: an n-gram drafter always has something to say."""
    return (random_prompts([7], VOCAB, seed)[0] * length)[:length]


def sampled_requests(count: int = 48) -> list[Request]:
    requests = []
    for index in range(count):
        kind = dict(temperature=0.8, top_p=0.95, seed=index) | SAMPLING[index % len(SAMPLING)]
        prompt = repeating(10 + 29 * index % 180, seed=index)
        requests.append(Request(f"{index}: {kind}", prompt, SamplingParams(max_tokens=40, **kind)))
    return requests


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [*mixed_requests(), *sampled_requests()]


@pytest.fixture(scope="module")
def alone(looping_llama: str, requests: list[Request]) -> list[list[Answer]]:
    """Without speculation, one after the other."""
    with engine(looping_llama, **UNCACHED) as llm:
        return run_alone(llm, requests)


def check(requests: list[Request], ours: list[list[Answer]], alone: list[list[Answer]]) -> None:
    different = differences(requests, ours, alone)
    assert not different, f"{len(different)} of {len(requests)} requests differ\n" + "\n".join(different[:5])


@pytest.mark.parametrize(
    "rule", ["standard", pytest.param("strict", marks=pytest.mark.slow), pytest.param("block", marks=pytest.mark.slow)]
)
def test_together(rule: str, looping_llama: str, requests: list[Request], alone: list[list[Answer]]) -> None:
    """n-gram drafts are one-hot, for which these rules have one and the same law."""
    with speculating(looping_llama, ngram(3, rejection_sample_method=rule), **UNCACHED) as llm:
        check(requests, run_together(llm, requests), alone)
        backwards = requests[::-1]
        check(backwards, run_together(llm, backwards), alone[::-1])
        assert accepted(llm) > 200


@pytest.mark.slow
def test_alone(looping_llama: str, requests: list[Request], alone: list[list[Answer]]) -> None:
    with speculating(looping_llama, ngram(3), **UNCACHED) as llm:
        check(requests, run_alone(llm, requests), alone)
        assert accepted(llm) > 100


SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": UNCACHED,
    "cached": dict(enable_prefix_caching=True),
    "chunked": UNCACHED | CHUNKED,
    "preempted": UNCACHED | SMALL_KV,
    "everything": dict(enable_prefix_caching=True) | CHUNKED | SMALL_KV,
}
ALL = [(method, k, schedule) for method in METHODS for k in (1, 3, 5, 8) for schedule in SCHEDULES]
QUICK = [("ngram", 5, "everything")]


@pytest.mark.parametrize(
    ("method", "k", "schedule"), [*QUICK, *(pytest.param(*c, marks=pytest.mark.slow) for c in ALL if c not in QUICK)]
)
def test_schedules(
    method: str, k: int, schedule: str, looping_llama: str, requests: list[Request], alone: list[list[Answer]]
) -> None:
    with speculating(looping_llama, METHODS[method](k), **SCHEDULES[schedule]) as llm:
        check(requests, run_together(llm, requests), alone)
        # Once more: out of the prefix cache, and for a suffix drafter with the answers of the first round in its tree.
        check(requests, run_together(llm, requests), alone)
        assert accepted(llm) > 100
        assert (preemptions(llm) > 0) == (schedule in ("preempted", "everything"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_other_workloads(seed: int, looping_llama: str) -> None:
    requests = mixed_requests(seed=seed)
    with engine(looping_llama, **UNCACHED) as llm:
        alone = run_alone(llm, requests)
    with speculating(looping_llama, ngram(4), **SCHEDULES["everything"]) as llm:
        check(requests, run_together(llm, requests), alone)
        assert preemptions(llm) > 0

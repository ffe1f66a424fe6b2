"""64 requests of mixed lengths and sampling parameters, all seeded: what a busy server has in flight at one time."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from vllm import LLM, RequestOutput, SamplingParams

from tests.full_tests.engines import engine, generate
from tests.full_tests.prompts import random_prompts
from tests.full_tests.tiny_models import VOCAB

# One of each kind of sampling; a request gets one of them and, if sampled, its own seed.
KINDS: list[dict[str, Any]] = [
    dict(temperature=0),
    dict(temperature=0, ignore_eos=True),
    dict(temperature=0.8, top_k=20),
    dict(temperature=1.0, top_p=0.9),
    dict(temperature=1.3, min_p=0.05),
    dict(temperature=0.7, top_k=40, top_p=0.8, min_p=0.02),
    dict(temperature=0, presence_penalty=1.0, frequency_penalty=0.5),
    dict(temperature=0.9, repetition_penalty=1.3),
    dict(temperature=0.9, logit_bias={5: 4.0, 9: -100.0, 77: 2.5}),
    dict(temperature=0, bad_words=["the", " a", "a bad word of many tokens, which nobody wrote"], ignore_eos=True),
    dict(temperature=1.0, allowed_token_ids=list(range(20, 120))),
    dict(temperature=1.0, min_tokens=12, logit_bias={1: 6.0}),
    dict(temperature=1.0, n=2, top_k=50),
    dict(temperature=1.0, stop=["e", "qu"]),
    dict(temperature=1.2, stop_token_ids=list(range(30, 60)), min_tokens=3),
    dict(temperature=0.9, frequency_penalty=-1.0, top_p=0.95),
]


@dataclass(frozen=True)
class Request:
    name: str
    prompt: list[int]
    params: SamplingParams


def mixed_requests(count: int = 64, seed: int = 0, kinds: list[dict[str, Any]] = KINDS) -> list[Request]:
    """Prompts of 3 to 400 tokens, 4 to 48 tokens out. Every third shares a long beginning, for the prefix cache."""
    rng = random.Random(seed)
    lengths = [rng.choice([rng.randint(3, 40), rng.randint(40, 150), rng.randint(150, 400)]) for _ in range(count)]
    prompts = random_prompts(lengths, VOCAB, seed)
    shared = random_prompts([130], VOCAB, seed + 1)[0]
    requests = []
    for index, prompt in enumerate(prompts):
        if index % 3 == 0:
            prompt = (shared + prompt)[: max(len(prompt), 140)]
        kind = dict(kinds[index % len(kinds)])
        if kind["temperature"] > 0:
            kind["seed"] = 1000 + index
        limit = max(rng.randint(4, 48), kind.get("min_tokens", 0))
        requests.append(Request(f"{index}: {kind}", prompt, SamplingParams(max_tokens=limit, **kind)))
    return requests


@dataclass(frozen=True)
class Answer:
    """All that a user sees of one completion."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None


def answers(outputs: list[RequestOutput]) -> list[list[Answer]]:
    return [[Answer(list(c.token_ids), c.text, c.finish_reason, c.stop_reason) for c in o.outputs] for o in outputs]


def run_together(llm: LLM, requests: list[Request]) -> list[list[Answer]]:
    return answers(generate(llm, [r.prompt for r in requests], [r.params for r in requests]))


def run_alone(llm: LLM, requests: list[Request]) -> list[list[Answer]]:
    return [run_together(llm, [request])[0] for request in requests]


def differences(requests: list[Request], ours: list[list[Answer]], reference: list[list[Answer]]) -> list[str]:
    """One line per request whose answer is another."""
    assert len(ours) == len(reference) == len(requests)
    return [
        f"{request.name}, prompt of {len(request.prompt)}:\n  {one}\n  {other}"
        for request, one, other in zip(requests, ours, reference, strict=False)
        if one != other
    ]


Plain = Callable[[str], list[list[Answer]]]
"""What a target says without speculation."""


def without_drafts(requests: list[Request]) -> Plain:
    """What a target says to them together, asked once."""

    @cache
    def answers_of(target: str) -> list[list[Answer]]:
        with engine(target) as llm:
            return run_together(llm, requests)

    return answers_of


def check_same(requests: list[Request], ours: list[list[Answer]], expected: list[list[Answer]]) -> None:
    different = differences(requests, ours, expected)
    assert not different, f"{len(different)} of {len(requests)} requests differ\n" + "\n".join(different[:5])

"""The workload for graph-check. A given seed produces the same workload on any device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

KINDS: tuple[dict[str, Any], ...] = (
    dict(temperature=0.0, ignore_eos=True),
    dict(temperature=0.8, top_k=20),
    dict(temperature=1.0, ignore_eos=True),
    dict(temperature=1.0, top_p=0.9),
    dict(temperature=0.0, logprobs=3),
    dict(temperature=0.0, extra_args={"num_speculative_tokens": 0}),
    dict(temperature=1.3, min_p=0.05),
    dict(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5),
    dict(temperature=0.7, top_k=40, top_p=0.8, min_p=0.02),
    dict(temperature=1.0, stop=[".", "e"]),
    dict(temperature=0.9, repetition_penalty=1.3, top_k=300),
    dict(temperature=0.0, logit_bias=(5, 9, 77)),
    dict(temperature=1.0, logprobs=0, top_p=0.95),
    dict(temperature=0.0, bad_words=["the", " a"], ignore_eos=True),
    dict(temperature=1.0, extra_args={"num_speculative_tokens": 1}, top_k=50),
    dict(temperature=1.0, allowed_token_ids=tuple(range(20, 120)), min_tokens=4),
    dict(temperature=0.9, n=2),
    dict(temperature=1.0, stop_token_ids=tuple(range(30, 60)), min_tokens=3),
    dict(temperature=1.0, extra_args={"num_speculative_tokens": 0}, frequency_penalty=0.5, logprobs=2),
    dict(temperature=0.0, choice=["yes", "no", "perhaps"]),
)
"""Sampling parameters of requests, which may need different graphs. `_fit_ids` adapts IDs to the vocabulary."""
PROMPT_LOGPROBS = (0, 1, 5)
LONGEST_ANSWER = 40
# The text is longer than a KV block, so that requests with the same beginning share a block.
_SHARED = 150

TEXT = """The harbour was quiet in the morning. Boats lay side by side along the wall, and nets hung over the rail to
dry. A woman counted crates: one of herring, two of mackerel, three of cod. She wrote each number into a small
book, and read it again. one, two, three, four, five, six, seven, eight, nine, ten, one, two, three, four, five.
def add(left: int, right: int) -> int:
    return left + right
{"name": "Ada", "age": 36, "city": "London"} {"name": "Alan", "age": 41, "city": "Wilmslow"}
Die Boote lagen still, und niemand sprach. Le vent venait de la mer. 12 * 12 = 144; 13 * 13 = 169; 14 * 14 = 196.
When the bell rang she closed the book, and when the bell rang again she opened it, and counted the crates again.
"""


@dataclass(frozen=True)
class Item:
    """A request, the step at which it arrives, and the number of steps after which its client aborts it."""

    name: str
    prompt: tuple[int, ...]
    params: dict[str, Any]
    arrives: int
    leaves_after: int | None = None


@dataclass(frozen=True)
class Limits:
    vocab: int
    max_model_len: int
    max_num_seqs: int


def make_mixed(count: int, seed: int, text: Sequence[int], limits: Limits) -> list[Item]:
    """Return the mixed workload. `text` contains TEXT as token IDs from the model's tokenizer."""
    rng = random.Random(seed)
    kinds = _draw_kinds(count, rng)
    arrivals = _draw_arrivals(count, rng, limits.max_num_seqs)
    shared = _draw_prompt(rng, _SHARED, text, limits.vocab)
    items = []
    for index, (kind, arrives) in enumerate(zip(kinds, arrivals, strict=True)):
        answer = max(rng.randint(1, LONGEST_ANSWER), kind.get("min_tokens", 0))
        prompt = _draw_prompt(rng, _draw_length(rng, limits.max_model_len - answer), text, limits.vocab)
        if index % 3 == 2 and limits.max_model_len > _SHARED + LONGEST_ANSWER + 64:
            prompt = (shared + prompt)[: max(len(prompt), _SHARED + 10)]
        if index == count // 2:
            # This request ends only at the end of the context, where fewer drafts fit.
            kind = KINDS[0]
            answer = min(12, limits.max_model_len // 2)
            prompt = _draw_prompt(rng, limits.max_model_len - answer, text, limits.vocab)
        leaves = rng.randint(2, 8) if index % 9 == 4 else None
        params = _fit_ids(kind, limits.vocab) | {"max_tokens": answer}
        if params["temperature"] > 0:
            params["seed"] = 1000 + index
        items.append(Item(f"mixed-{index}", prompt, params, arrives, leaves))
    return items


def make_prompt_logprobs(seed: int, text: Sequence[int], limits: Limits) -> list[Item]:
    """Return requests with prompt log-probabilities, and one request without them."""
    rng = random.Random(seed + 1)
    items = []
    for index, number in enumerate((*PROMPT_LOGPROBS, None)):
        prompt = _draw_prompt(rng, _draw_length(rng, limits.max_model_len - 6), text, limits.vocab)
        params = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "prompt_logprobs": number}
        items.append(Item(f"prompt-logprobs-{index}", prompt, params, 2 * index))
    return items


def _draw_kinds(count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return all kinds in random order, and each kind once before any kind is repeated."""
    kinds: list[dict[str, Any]] = []
    while len(kinds) < count:
        kinds += rng.sample(KINDS, len(KINDS))
    return kinds[:count]


def _draw_arrivals(count: int, rng: random.Random, max_num_seqs: int) -> list[int]:
    """Return arrival steps in waves, some larger than the batch, separated by pauses in which the batch drains."""
    arrivals: list[int] = []
    tick = 0
    while len(arrivals) < count:
        wave = rng.choice((1, 2, max_num_seqs, max_num_seqs + 2))
        for _ in range(min(wave, count - len(arrivals))):
            arrivals.append(tick)
            tick += rng.choice((0, 0, 1, 3))
        tick += rng.choice((4, 12, 30))
    return arrivals


def _draw_length(rng: random.Random, longest: int) -> int:
    """Return a random length from a log-uniform distribution."""
    return max(1, min(longest, round(2 ** rng.uniform(0, longest.bit_length()))))


def _draw_prompt(rng: random.Random, length: int, text: Sequence[int], vocab: int) -> tuple[int, ...]:
    style = rng.choice(("text", "text", "repeated", "any"))
    if style == "any":
        return tuple(rng.randrange(vocab) for _ in range(length))
    begin = rng.randrange(len(text))
    passage = [*text[begin:], *text[:begin]]
    if style == "repeated":  # n-gram drafters find these repetitions
        passage = passage[: rng.randint(4, 24)]
    return tuple((passage * (length // len(passage) + 1))[:length])


def _fit_ids(kind: dict[str, Any], vocab: int) -> dict[str, Any]:
    """Map token IDs in the parameters to IDs in this vocabulary."""
    params = dict(kind)
    for name in ("allowed_token_ids", "stop_token_ids"):
        if name in params:
            params[name] = sorted({token % vocab for token in params[name]})
    if "logit_bias" in params:
        ids = (token % vocab for token in params["logit_bias"])
        params["logit_bias"] = dict(zip(ids, (4.0, -100.0, 2.5), strict=True))
    return params

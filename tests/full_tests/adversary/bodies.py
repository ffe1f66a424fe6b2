"""Completion requests drawn at random: every sampling parameter up to its edges, alone and crossed with others."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.full_tests.prompts import random_prompts
from tests.full_tests.structured import KINDS

STOPS = ["e", "th", "qu", " a", "ompil", "0", "\n", "é", "e fox", "\ufffd"]
BAD_WORDS = ["the", " a", "e", "compile", "ab", "shape", "quick", "0", "zzzz", "device"]
_SEEDS = [0, 1, 7, 2**31 - 1, 2**31, 2**63 - 5, -(2**63), -(2**31)]
_SHARED_PROMPT = 100


@dataclass(frozen=True)
class Drawing:
    """The facts about an engine that its requests are drawn from."""

    vocab: int
    eos: int
    num_drafts: int
    max_len: int
    has_priorities: bool

    def draw(self, seed: str) -> dict[str, Any]:
        """Return the body of the request that `seed` stands for."""
        rng = random.Random(seed)
        body = self._plain(rng)
        if rng.random() < 0.15:
            kind = rng.choice(sorted(KINDS))
            body["structured_outputs"] = KINDS[kind][0]
            # Whatever forbids a token may leave the grammar none.
            features, body["max_tokens"] = _BESIDE_GRAMMARS, rng.choice([8, 48, 96])
        else:
            features = tuple(FEATURES)
        for name in rng.sample(features, rng.choice([0, 1, 2, 2, 3, 4])):
            body |= FEATURES[name](rng, self, body["max_tokens"])
        if not body["temperature"]:
            body.pop("n", None)  # vLLM refuses several equal answers
        if "logprob_token_ids" in body:
            body["logprobs"] = len(body["logprob_token_ids"])  # vLLM refuses another number
        if len(body.get("allowed_token_ids", ())) == 1:
            for name in ("bad_words", "stop_token_ids"):
                body.pop(name, None)
        return body

    def _plain(self, rng: random.Random) -> dict[str, Any]:
        prompt = self._prompt(rng)
        room = self.max_len - len(prompt)
        body: dict[str, Any] = dict(
            prompt=prompt,
            max_tokens=min(rng.choice([1, rng.randint(2, 24), rng.randint(8, 72), rng.randint(8, 72)]), room),
        )
        temperatures = [0, 0, 0, 0, 1e-6, 0.01, 0.5, 0.8, 1.0, 1.0, 1.5, 2.0]
        body["temperature"] = rng.choice(temperatures)
        if body["temperature"] and rng.random() < 0.85:
            body["seed"] = rng.choice([*_SEEDS, rng.getrandbits(40)])
        if rng.random() < 0.3:
            wanted = rng.choice([0, 1, self.num_drafts, rng.randint(0, self.num_drafts), 2**40])
            body["vllm_xargs"] = dict(num_speculative_tokens=wanted)
        if self.has_priorities:
            body["priority"] = rng.choice([-(2**31), -1, 0, 0, 1, 5])
        return body

    def _prompt(self, rng: random.Random) -> list[int]:
        """Tokens in circles, which drafters foresee, noise, one of few shared beginnings, or nearly all there is room
        for."""
        near_end = self.max_len - rng.randint(1, 2 * self.num_drafts + 2)
        length = rng.choice([1, 2, rng.randint(3, 40), rng.randint(3, 40), rng.randint(40, 200), near_end])
        noise = random_prompts([length], self.vocab, rng.getrandbits(32))[0]
        kind = rng.choice(["circle", "circle", "noise", "shared"])
        if kind == "circle":
            period = rng.randint(1, 9)
            return (noise[:period] * length)[:length]
        if kind == "shared":
            return (random_prompts([_SHARED_PROMPT], self.vocab, rng.randint(0, 2))[0] + noise)[:length]
        return noise


def _ids(rng: random.Random, drawing: Drawing, count: int) -> list[int]:
    return rng.sample(range(drawing.vocab), count)


def _number(name: str, *values: Any) -> Callable[[random.Random, Drawing, int], dict[str, Any]]:
    return lambda rng, drawing, limit: {name: rng.choice(values)}


def _draw_bias(rng: random.Random, drawing: Drawing, limit: int) -> dict[str, Any]:
    ids = _ids(rng, drawing, rng.choice([1, 3, 20, 100]))
    bias = {str(i): rng.choice([-100, -5.0, -1e-3, 0, 2.5, 4.0]) for i in ids}
    return dict(logit_bias=bias | ({str(drawing.eos): rng.choice([3.0, 100])} if rng.random() < 0.3 else {}))


def _draw_allowed(rng: random.Random, drawing: Drawing, limit: int) -> dict[str, Any]:
    ids = [i for i in _ids(rng, drawing, rng.choice([2, 80, 200])) if i != drawing.eos]
    return dict(allowed_token_ids=ids if len(ids) > 2 else ids[:1])


FEATURES: dict[str, Callable[[random.Random, Drawing, int], dict[str, Any]]] = {
    "top_k": _number("top_k", -1, 0, 1, 2, 20, 399, 2**31 - 1),
    "top_p": _number("top_p", 1e-9, 0.1, 0.5, 0.9, 0.999999, 1.0),
    "min_p": _number("min_p", 0.0, 1e-9, 0.05, 0.5, 1.0),
    "presence_penalty": _number("presence_penalty", -2.0, -0.3, 0.7, 2.0),
    "frequency_penalty": _number("frequency_penalty", -2.0, -0.3, 0.5, 2.0),
    "repetition_penalty": _number("repetition_penalty", 1e-3, 0.7, 1.2, 10.0),
    "n": _number("n", 2, 3, 4),
    "logprobs": _number("logprobs", 0, 1, 5, 20),
    "prompt_logprobs": _number("prompt_logprobs", 0, 1, 20),
    "echo": lambda rng, drawing, limit: dict(echo=True, logprobs=rng.choice([None, 0, 1, 3])),
    "ignore_eos": lambda rng, drawing, limit: dict(ignore_eos=True),
    "min_tokens": lambda rng, drawing, limit: dict(min_tokens=rng.choice([1, limit // 2, limit])),
    "stop": lambda rng, drawing, limit: dict(
        stop=rng.sample(STOPS, rng.randint(1, 4)), include_stop_str_in_output=rng.random() < 0.4
    ),
    "stop_token_ids": lambda rng, drawing, limit: dict(stop_token_ids=_ids(rng, drawing, rng.choice([1, 5, 30]))),
    "bad_words": lambda rng, drawing, limit: dict(bad_words=rng.sample(BAD_WORDS, rng.randint(1, 4))),
    "logit_bias": _draw_bias,
    "allowed_token_ids": _draw_allowed,
    "logprob_token_ids": lambda rng, drawing, limit: dict(logprob_token_ids=_ids(rng, drawing, 3)),
    "truncate_prompt_tokens": lambda rng, drawing, limit: dict(truncate_prompt_tokens=rng.choice([1, 3, 50])),
    "skip_special_tokens": lambda rng, drawing, limit: dict(skip_special_tokens=False),
    "cache_salt": lambda rng, drawing, limit: dict(cache_salt=rng.choice(["a", "b"])),
}
_BESIDE_GRAMMARS = (
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "n",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "cache_salt",
)

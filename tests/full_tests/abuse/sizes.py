"""Requests of at most 1 MB that are as large as they can be in one respect, and what each may cost."""

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.full_tests.abuse.judge import Judge
from tests.full_tests.abuse.watcher import NORMAL, Watcher
from tests.full_tests.resident import Resident
from tests.full_tests.tiny_models import VOCAB

MOST_BYTES = 1_000_000
MOST_MEBIBYTES = 64.0
"""Added to the peak memory of all processes of the server."""
MOST_SLOWDOWN = 2.0
"""How much longer other requests may take beside it."""
_SHOWN = 120
ATTEMPTS = 10
"""A machine with other work to do slows a neighbor now and then: the least of these counts."""

COMPLETION = "/v1/completions"
TEXT = "The quick brown fox "


def _long(letters: int = 900_000) -> str:
    return (TEXT * (1 + letters // len(TEXT)))[:letters]


def _complete(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETION, dict(prompt="hi", max_tokens=6, temperature=0) | fields


def _words(count: int) -> list[str]:
    return [f"word{number}" for number in range(count)]


_BAD_WORD = "abcdefgh" * 2_500
_BIAS = {str(i): 0 for i in range(VOCAB)}
CASES: dict[str, Callable[[], tuple[str, dict[str, Any]]]] = {
    # logit edits
    "a bad word of 20,000 letters": lambda: _complete(bad_words=[_BAD_WORD]),
    "a bad word of 20,000 letters, and biases": lambda: _complete(bad_words=[_BAD_WORD], logit_bias=_BIAS),
    "a bad word of 900,000 letters": lambda: _complete(bad_words=[_long()]),
    "a bad word of 60 letters, and biases": lambda: _complete(bad_words=["abcdefgh" * 8], logit_bias=_BIAS),
    "100 bad words": lambda: _complete(bad_words=_words(100)),
    "64 bad words, and biases": lambda: _complete(bad_words=_words(64), logit_bias=_BIAS),
    "75,000 bad words": lambda: _complete(bad_words=_words(75_000)),
    "a bias on every token": lambda: _complete(logit_bias=_BIAS),
    "60,000 biases": lambda: _complete(logit_bias={str(10**6 + i): 1 for i in range(60_000)}),
    "biases with ids of 4,000 digits": lambda: _complete(logit_bias={"9" * 4_000 + str(i): 1 for i in range(200)}),
    # ids and stops
    "every token allowed 400 times": lambda: _complete(allowed_token_ids=[*range(VOCAB)] * 400),
    "175,000 stop ids": lambda: _complete(stop_token_ids=[7 + i % 90 for i in range(175_000)]),
    "180,000 stop ids and min_tokens": lambda: _complete(stop_token_ids=[*range(7, 97)] * 2_000, min_tokens=4),
    "16 stop strings of 50,000 letters": lambda: _complete(stop=[_long(50_000)] * 16, max_tokens=24),
    "4,000 stop strings": lambda: _complete(stop=_words(4_000), max_tokens=24),
    "75,000 stop strings": lambda: _complete(stop=_words(75_000), max_tokens=24),
    "a stop string of 900,000 letters": lambda: _complete(stop=[_long()], max_tokens=24),
    # log-probabilities
    "all log-probabilities that one may ask for": lambda: _complete(
        prompt=[7] * 480, logprobs=20, prompt_logprobs=20, echo=True, max_tokens=24
    ),
    "log-probabilities of every token": lambda: _complete(logprobs=1, logprob_token_ids=[*range(VOCAB)]),
    "log-probabilities of 20 ids": lambda: _complete(logprobs=1, logprob_token_ids=[*range(20)]),
    "log-probabilities of 150,000 ids": lambda: _complete(logprobs=1, logprob_token_ids=[*range(VOCAB)] * 375),
    "a million log-probabilities": lambda: _complete(logprobs=10**6, prompt_logprobs=10**6),
    # prompts
    "a prompt of 900,000 letters": lambda: _complete(prompt=_long()),
    "a prompt of 900,000 letters without a space": lambda: _complete(prompt="a" * 900_000),
    "a prompt of 300,000 ids": lambda: _complete(prompt=[7] * 300_000),
    "200 prompts": lambda: _complete(prompt=[[7, i] for i in range(200)], max_tokens=1),
    "60,000 prompts": lambda: _complete(prompt=[[7, i % VOCAB] for i in range(60_000)], max_tokens=1),
    "embeddings of 600,000 bytes": lambda: _complete(prompt_embeds=base64.b64encode(b"\0" * 600_000).decode()),
    "8 answers of the longest kind": lambda: _complete(prompt="hi", n=8, max_tokens=2, seed=1, temperature=1),
    "2^31 answers": lambda: _complete(n=2**31, temperature=1),
    # arguments
    "an argument of 900,000 letters": lambda: _complete(vllm_xargs={"a": _long()}),
    "50,000 arguments": lambda: _complete(vllm_xargs={f"a{i}": 1 for i in range(50_000)}),
    "an argument of 150,000 numbers": lambda: _complete(vllm_xargs={"a": [0.5] * 150_000}),
}
QUICK = (
    "a bad word of 20,000 letters, and biases",
    "75,000 bad words",
    "a bias on every token",
    "biases with ids of 4,000 digits",
    "every token allowed 400 times",
    "180,000 stop ids and min_tokens",
    "16 stop strings of 50,000 letters",
    "75,000 stop strings",
    "all log-probabilities that one may ask for",
    "log-probabilities of every token",
    "a prompt of 900,000 letters without a space",
    "8 answers of the longest kind",
)


@dataclass(frozen=True)
class Cost:
    """Record what a request cost its neighbors."""

    name: str
    answer: str
    """Its status, and the beginning of an error's message."""
    mebibytes: float
    """Growth of all processes together, at its peak."""
    slowdown: float
    """How many times the time of its slowest neighbor just before the slowest neighbor took."""

    def __str__(self) -> str:
        return f"{self.name}: {self.answer}, {self.mebibytes:+.0f} MiB, neighbors {self.slowdown:.1f} times as slow"

    @property
    def is_within_budget(self) -> bool:
        return self.mebibytes <= MOST_MEBIBYTES and self.slowdown <= MOST_SLOWDOWN


@dataclass
class Scales:
    """Measures requests beside the watcher's."""

    judge: Judge
    watcher: Watcher
    resident: Resident
    costs: list[Cost] = field(default_factory=list)

    def measure(self, name: str) -> Cost:
        """Return a request's cost: of several attempts the largest memory, and the least slowdown.

        Neighbors are timed right before each attempt as well, since other programs of the machine slow both.
        """
        path, fields = CASES[name]()
        body = json.dumps({"model": "tiny"} | fields)
        assert len(body) <= MOST_BYTES, len(body)
        mebibytes, slowdowns = 0.0, []
        for _ in range(ATTEMPTS):
            self.resident.sample()
            before = self.resident.now
            usual = self._watch(lambda: self.watcher.wait_requests(2 * len(NORMAL)))
            self.resident.reset_peak()
            times = self._watch(lambda: self._send(path, body))
            mebibytes = max(mebibytes, self.resident.peak() - before)
            ratios = [max(found) / max(alone) for found, alone in zip(times, usual, strict=True) if found]
            slowdowns.append(max(ratios, default=1.0))
            if slowdowns[-1] <= MOST_SLOWDOWN:
                break
        self.costs.append(Cost(name, self._answer, mebibytes, min(slowdowns)))
        return self.costs[-1]

    def _send(self, path: str, body: str) -> None:
        response = self.judge.send(path, body)
        error = "" if response.status_code == 200 else " " + response.text[:_SHOWN]
        self._answer = f"{response.status_code}{error}"
        self.watcher.wait_requests(1)

    def _watch(self, act: Callable[[], object]) -> list[list[float]]:
        """Return how long neighbors took that were there while `act` ran, by their kind."""
        first = len(self.watcher.times)
        act()
        times: list[list[float]] = [[] for _ in NORMAL]
        for kind, start, end in self.watcher.times[first:]:
            times[kind].append(end - start)
        return times

    def worst(self) -> list[Cost]:
        """Return the three costs that come closest to the budget or exceed it by most."""
        return sorted(self.costs, key=lambda c: -max(c.mebibytes / MOST_MEBIBYTES, c.slowdown / MOST_SLOWDOWN))[:3]

"""Requests of at most 1 MB that are as large as they can be in one respect, and what each may cost."""

import json
from collections.abc import Callable
from dataclasses import dataclass
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


def _complete(**fields: Any) -> dict[str, Any]:
    return dict(prompt="hi", max_tokens=6, temperature=0) | fields


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "a bad word of 20,000 letters, and a bias on every token": lambda: _complete(
        bad_words=["abcdefgh" * 2_500], logit_bias={str(i): 0 for i in range(VOCAB)}
    ),
    "75,000 bad words": lambda: _complete(bad_words=[f"word{number}" for number in range(75_000)]),
    "every token allowed 400 times": lambda: _complete(allowed_token_ids=[*range(VOCAB)] * 400),
    "180,000 stop ids and min_tokens": lambda: _complete(stop_token_ids=[*range(7, 97)] * 2_000, min_tokens=4),
    "all log-probabilities that one may ask for": lambda: _complete(
        prompt=[7] * 480, logprobs=20, prompt_logprobs=20, echo=True, max_tokens=24
    ),
    "an argument of 900,000 letters": lambda: _complete(vllm_xargs={"a": "The quick brown fox " * 45_000}),
}


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

    def measure(self, name: str) -> Cost:
        """Return a request's cost: of several attempts the largest memory, and the least slowdown.

        Neighbors are timed right before each attempt as well, since other programs of the machine slow both.
        """
        body = json.dumps({"model": "tiny"} | CASES[name]())
        assert len(body) <= MOST_BYTES, len(body)
        mebibytes, slowdowns = 0.0, []
        for _ in range(ATTEMPTS):
            self.resident.sample()
            before = self.resident.now
            usual = self._watch(lambda: self.watcher.wait_requests(2 * len(NORMAL)))
            self.resident.reset_peak()
            times = self._watch(lambda: self._send(body))
            mebibytes = max(mebibytes, self.resident.peak() - before)
            ratios = [max(found) / max(alone) for found, alone in zip(times, usual, strict=True) if found]
            slowdowns.append(max(ratios, default=1.0))
            if slowdowns[-1] <= MOST_SLOWDOWN:
                break
        return Cost(name, self._answer, mebibytes, min(slowdowns))

    def _send(self, body: str) -> None:
        response = self.judge.send("/v1/completions", body)
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

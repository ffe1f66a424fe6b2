"""A well-behaved client beside the abuse: the same requests again and again, whose answers must not change."""

import threading
import time
from types import TracebackType
from typing import Any, Self

import httpx

from tests.full_tests.server import Server

_LONG: dict[str, Any] = dict(max_tokens=60, ignore_eos=True)
SEEDED = dict(temperature=1.0, seed=11)
NORMAL: list[dict[str, Any]] = [
    dict(prompt="The quick brown fox", temperature=0, **_LONG),
    dict(prompt="A device compiles a graph", temperature=0, logprobs=2, **_LONG),
    dict(prompt="The quick brown fox", top_p=0.9, **_LONG, **SEEDED),
    dict(prompt="0123456789 " * 5, n=2, top_k=20, repetition_penalty=1.2, **_LONG, **SEEDED),
    dict(prompt="yes or no?", structured_outputs=dict(regex="(yes|no|maybe){4}"), max_tokens=24, **SEEDED),
    dict(prompt="The quick brown fox", vllm_xargs=dict(num_speculative_tokens=0), temperature=0, **_LONG),
]


def said(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


class Watcher:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.expected = [said(server.complete(**body)) for body in NORMAL]
        self.num_compared = 0
        self.changed: list[str] = []
        self.times: list[tuple[int, float, float]] = []
        """Index in NORMAL, begin and end of each request."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        client = httpx.Client(base_url=self.server.client.base_url, timeout=120)
        while not self._over.is_set() and not self.changed:
            for kind, (body, expected) in enumerate(zip(NORMAL, self.expected, strict=True)):
                began = time.monotonic()
                try:
                    response = client.post("/v1/completions", json={"model": "tiny"} | body)
                    got = said(response.json()) if response.status_code == 200 else response.text
                except (httpx.HTTPError, ValueError) as error:
                    got = repr(error)
                self.times.append((kind, began, time.monotonic()))
                self.num_compared += 1
                if got != expected:
                    self.changed.append(f"{body}: {expected} became {got}")
            self._over.wait(0.02)

    def wait_requests(self, count: int) -> None:
        """Wait until so many more of its requests have ended."""
        enough = self.num_compared + count
        while self.num_compared < enough and not self.changed:
            time.sleep(0.005)

    def check(self) -> None:
        assert not self.changed, self.changed[0]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(timeout=120)

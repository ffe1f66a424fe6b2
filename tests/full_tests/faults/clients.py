"""Clients of a server, well-behaved and not."""

import contextlib
import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from tests.full_tests.server import Server


def body(index: int, num_tokens: int = 40) -> dict[str, Any]:
    """A greedy or a seeded request. Lengths differ, and some share a beginning."""
    kinds: list[dict[str, Any]] = [dict(temperature=0), dict(temperature=1.0, top_p=0.9)]
    prompt = f"Number {index % 7} of many: " * (1 + index % 5) + str(index)
    return dict(prompt=prompt, max_tokens=num_tokens, ignore_eos=True, seed=index, **kinds[index % 2])


def bodies(count: int, num_tokens: int = 40) -> list[dict[str, Any]]:
    return [body(index, num_tokens) for index in range(count)]


def text(server: Server, wanted: dict[str, Any]) -> str:
    """Over a connection of its own: one that is kept may be closed at the very moment at which it is used again."""
    response = httpx.post(f"{server.client.base_url}/v1/completions", json=wanted | dict(model="tiny"), timeout=120)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def texts(server: Server, wanted: list[dict[str, Any]]) -> list[str]:
    with ThreadPoolExecutor(len(wanted)) as pool:
        return list(pool.map(lambda each: text(server, each), wanted))


def check_storm(server: Server, count: int, quiet: list[str]) -> None:
    """Requests that go away disturb no others, and leave nothing. `quiet`: what `bodies(12)` get without them."""
    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(storm, server, count)
        while not gone.done():
            assert texts(server, bodies(12)) == quiet
    assert gone.result() > count // 2
    server.wait_idle()
    assert server.metric("vllm:num_requests_running") == server.metric("vllm:kv_cache_usage_perc") == 0
    assert texts(server, bodies(12)) == quiet
    # As many as may run at once: were a row lost, one of them would wait for ever.
    assert all(texts(server, bodies(32, num_tokens=8)))


def storm(server: Server, count: int, at_a_time: int = 40, seed: int = 0) -> int:
    """So many requests that go away: before the answer, in the middle of a stream, at its first byte. Returns how many
    did so before their end."""
    rng = random.Random(seed)
    patience = [rng.choice([0.005, rng.uniform(0, 0.2), rng.uniform(0.2, 1.0)]) for _ in range(count)]
    with ThreadPoolExecutor(at_a_time) as pool:
        return sum(pool.map(lambda each: _goes_away(server, *each), enumerate(patience)))


def _goes_away(server: Server, index: int, seconds: float) -> bool:
    """Closes its connection when its patience ends; whether that was before the answer's end."""
    wanted = body(index, num_tokens=300) | dict(model="tiny", stream=bool(index % 2))
    deadline = time.monotonic() + seconds
    try:
        url = f"{server.client.base_url}/v1/completions"
        with httpx.stream("POST", url, json=wanted, timeout=max(seconds, 0.001)) as response:
            for _ in response.iter_raw():
                if time.monotonic() > deadline:
                    return True
    except httpx.TransportError:  # its patience as a timeout
        return True
    return False


@dataclass
class Answer:
    status: int | None
    """None where the connection broke before there was one."""
    text: str
    finished: bool
    """The answer was whole."""
    seconds: float


def ask(server: Server, wanted: dict[str, Any], *, stream: bool) -> Answer:
    """Whatever comes of it, within the client's time."""
    began, pieces, status = time.monotonic(), "", None
    asked = wanted | dict(model="tiny", stream=stream)
    with contextlib.suppress(httpx.TransportError):
        if not stream:
            response = httpx.post(f"{server.client.base_url}/v1/completions", json=asked, timeout=120)
            whole = response.status_code == 200
            return Answer(response.status_code, response.text, whole, time.monotonic() - began)
        with httpx.stream("POST", f"{server.client.base_url}/v1/completions", json=asked, timeout=120) as response:
            status = response.status_code
            for line in response.iter_lines():
                pieces += line + "\n"
    finished = "data: [DONE]" in pieces and '"error"' not in pieces
    return Answer(status, pieces, finished, time.monotonic() - began)


@contextlib.contextmanager
def asking(server: Server, wanted: list[dict[str, Any]]) -> Iterator[list[Future[Answer]]]:
    """Requests under way, every second of them a stream; the block begins when they run."""
    before = server.metric("vllm:generation_tokens_total")
    with ThreadPoolExecutor(len(wanted)) as pool:
        answers = [pool.submit(ask, server, each, stream=bool(index % 2)) for index, each in enumerate(wanted)]
        deadline = time.monotonic() + 60
        while server.metric("vllm:generation_tokens_total") < before + 2 * len(wanted):
            assert time.monotonic() < deadline, "nothing is generated"
            time.sleep(0.05)
        yield answers

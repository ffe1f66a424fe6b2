"""The soak's clients: what they ask, when, and whether they wait for the answer. Everything drawn from one seed."""

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.full_tests.prompts import random_prompts
from tests.full_tests.structured import CHOICES, NUMBER, SCHEMA
from tests.full_tests.tiny_models import VOCAB
from tests.full_tests.workload import KINDS, Answer, Request, mixed_requests

MORE_KINDS: list[dict[str, Any]] = [
    dict(temperature=0, logprobs=3),
    dict(temperature=0.9, top_p=0.9, logprobs=0),
    dict(temperature=0, structured_outputs=StructuredOutputsParams(regex=NUMBER)),
    dict(temperature=0.8, structured_outputs=StructuredOutputsParams(regex=NUMBER)),
    dict(temperature=0, structured_outputs=StructuredOutputsParams(choice=CHOICES)),
    dict(temperature=1.0, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
]
# What of a request's parameters is said over HTTP, under the same names
_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens", "min_tokens", "ignore_eos", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids"),
    *("stop_token_ids", "logprobs"),
)


def catalog(count: int, seed: int) -> list[Request]:
    """Requests whose answers are known: greedy ones, and sampled ones with seeds of their own."""
    return mixed_requests(count, seed, [*KINDS, *MORE_KINDS])


def body_of(request: Request) -> dict[str, Any]:
    usual = SamplingParams()
    said = {name: getattr(request.params, name) for name in _FIELDS}
    body = {name: value for name, value in said.items() if value != getattr(usual, name) or name == "temperature"}
    if (constraint := request.params.structured_outputs) is not None:
        kinds = {kind: getattr(constraint, kind) for kind in ("json", "regex", "choice")}
        body["structured_outputs"] = {kind: value for kind, value in kinds.items() if value is not None}
    return body | dict(model="tiny", prompt=request.prompt, return_token_ids=True)


def answers_of(choices: list[dict[str, Any]]) -> list[Answer]:
    """Of an answer in one piece."""
    names = ("token_ids", "text", "finish_reason", "stop_reason")
    return [Answer(*(choice[name] for name in names)) for choice in sorted(choices, key=lambda c: c["index"])]


@dataclass
class Attempt:
    """A request that was sent."""

    request: int | None
    """Its place in the catalog; None where nobody knows the answer."""
    answers: list[Answer] = field(default_factory=list)
    """As far as they came."""
    is_whole: bool = False
    has_left: bool = False
    """The client did not wait for the end."""
    error: str = ""


@dataclass(frozen=True)
class Phase:
    """How the clients behave for a while."""

    rate: float
    """Arrivals a second."""
    aborted: float
    """The share of clients that do not wait for the end of their answers."""
    patience: float
    """Of those: they leave within so many seconds, or half of those that stream, within MOST_PIECES pieces."""


PHASES = {
    "calm": Phase(rate=3, aborted=0.1, patience=1.0),
    "busy": Phase(rate=15, aborted=0.2, patience=2.0),
    "crowd": Phase(rate=60, aborted=0.2, patience=4.0),
    # Most leave before their first token, all at about the same time.
    "storm": Phase(rate=40, aborted=0.9, patience=0.5),
}
OFTEN = {"calm": 3, "busy": 4, "crowd": 4, "storm": 1}
MOST_PIECES = 24
LONGEST_PHASE = 6.0
MOST_OPEN = 48
"""Requests at a time: who comes later has to wait, so that a slow machine is not buried."""


class Clients:
    def __init__(self, url: str, known: list[dict[str, Any]], max_scheduled_drafts: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._known = known
        self._most_drafts = max_scheduled_drafts
        limits = httpx.Limits(max_connections=2 * MOST_OPEN)
        self._http = httpx.AsyncClient(base_url=url, timeout=600, limits=limits)
        self.attempts: list[Attempt] = []
        self.phase = "calm"
        self.num_open = 0

    async def run(self, seconds: float) -> None:
        """Send for so long, and wait for what is open then."""
        loop, tasks = asyncio.get_running_loop(), set()
        end = loop.time() + seconds
        for name, length in self._phases():
            self.phase, phase = name, PHASES[name]
            phase_end = min(loop.time() + length, end)
            while loop.time() < phase_end:
                await asyncio.sleep(self._rng.expovariate(phase.rate))
                if self.num_open < MOST_OPEN:
                    task = asyncio.create_task(self._one(phase))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            if loop.time() >= end:
                break
        await asyncio.gather(*tasks)
        await self._http.aclose()

    def _phases(self) -> Iterator[tuple[str, float]]:
        while True:
            [name] = self._rng.choices([*OFTEN], [*OFTEN.values()])
            yield name, self._rng.uniform(1, LONGEST_PHASE)

    async def _one(self, phase: Phase) -> None:
        attempt, body = self._draw()
        streams, leaves = self._rng.random() < 0.5, self._rng.random() < phase.aborted
        patience, most_pieces = None, None
        if leaves and streams and self._rng.random() < 0.5:
            most_pieces = self._rng.randint(1, MOST_PIECES)
        elif leaves:
            patience = self._rng.uniform(0, phase.patience)
        self.attempts.append(attempt)
        self.num_open += 1
        try:
            asked = self._stream(attempt, body, most_pieces) if streams else self._ask(attempt, body)
            await asyncio.wait_for(asked, patience)
            if not (attempt.is_whole or attempt.has_left or attempt.error):
                attempt.error = "the stream ended before its answer did"
        except Exception as error:  # an answer that is none fails in many ways
            attempt.has_left = isinstance(error, TimeoutError) and patience is not None
            attempt.error = attempt.error if attempt.has_left else repr(error)
        finally:
            self.num_open -= 1

    def _draw(self) -> tuple[Attempt, dict[str, Any]]:
        rng = self._rng
        if rng.random() < 0.75:
            place = rng.randrange(len(self._known))
            return Attempt(place), self._known[place]
        # A neighbor: a text that nobody else has, without a seed, with a wish of its own how much is drafted.
        prompt = random_prompts([rng.randint(1, 300)], VOCAB, rng.getrandbits(32))[0]
        drafts = {"num_speculative_tokens": rng.randint(0, self._most_drafts)}
        body = dict(model="tiny", prompt=prompt, max_tokens=rng.randint(1, 64), temperature=1.0, vllm_xargs=drafts)
        return Attempt(None), body

    async def _ask(self, attempt: Attempt, body: dict[str, Any]) -> None:
        response = await self._http.post("/v1/completions", json=body)
        if response.status_code != 200:
            attempt.error = response.text
            return
        choices = response.json()["choices"]
        if attempt.request is not None:
            attempt.answers = answers_of(choices)
        attempt.is_whole = True

    async def _stream(self, attempt: Attempt, body: dict[str, Any], most_pieces: int | None) -> None:
        async with self._http.stream("POST", "/v1/completions", json=body | dict(stream=True)) as response:
            if response.status_code != 200:
                attempt.error = (await response.aread()).decode()
                return
            pieces = 0
            async for line in response.aiter_lines():
                if pieces == most_pieces:
                    attempt.has_left = True
                    return
                event = line.removeprefix("data: ")
                if event == "[DONE]":
                    attempt.is_whole = True
                elif event:
                    pieces += 1
                    self._take(attempt, json.loads(event))

    @staticmethod
    def _take(attempt: Attempt, event: dict[str, Any]) -> None:
        if "error" in event:
            attempt.error = json.dumps(event["error"])
            return
        for piece in event["choices"] if attempt.request is not None else ():
            while len(attempt.answers) <= piece["index"]:
                attempt.answers.append(Answer([], "", None, None))
            so_far = attempt.answers[piece["index"]]
            attempt.answers[piece["index"]] = Answer(
                [*so_far.token_ids, *(piece["token_ids"] or ())],
                so_far.text + piece["text"],
                piece["finish_reason"] or so_far.finish_reason,
                piece["stop_reason"] if piece["stop_reason"] is not None else so_far.stop_reason,
            )

"""The soak's clients tell a server that fails from a client that leaves."""

import asyncio
import itertools
import json
import selectors
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.full_tests import soak_load
from tests.full_tests.soak_load import Attempt, Clients, Phase

CHOICE = {"index": 0, "token_ids": [1], "text": "a", "finish_reason": "length", "stop_reason": None}
PIECE = f"data: {json.dumps({'choices': [CHOICE]})}\n\n"
WHOLE = PIECE + "data: [DONE]\n\n"


class Waits(selectors.DefaultSelector):
    """Nothing is waited for: the clock of its loop goes on at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout and 0)
        if not found and timeout is not None:
            self.now += max(timeout, 0)
        return found


class OwnTime(asyncio.SelectorEventLoop):
    """Its clock stands still while something is computed: a slow machine has as many clients as a fast one."""

    def __init__(self) -> None:
        self._waits = Waits()
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.now


async def never_ends() -> AsyncIterator[bytes]:
    while True:
        yield PIECE.encode()
        await asyncio.sleep(0.01)


def attempts(
    monkeypatch: pytest.MonkeyPatch, stream: str | None, answer: str, aborted: float
) -> tuple[list[Attempt], list[Attempt]]:
    """Of a server that answers all streams, and all others, with the same. Those with a stream, and the others."""
    streams: list[Attempt] = []

    def respond(request: httpx.Request) -> httpx.Response:
        if not json.loads(request.content).get("stream"):
            return httpx.Response(200, content=answer)
        return httpx.Response(200, content=never_ends() if stream is None else stream)

    class Noting(Clients):
        async def _stream(self, attempt: Attempt, *more: object) -> None:
            streams.append(attempt)
            await super()._stream(attempt, *more)  # type: ignore[arg-type]

    for name in soak_load.PHASES:
        monkeypatch.setitem(soak_load.PHASES, name, Phase(rate=200, aborted=aborted, patience=0.1))

    async def load() -> list[Attempt]:
        clients = Noting("http://server", [dict(model="tiny", prompt=[1])], 3, seed=0)
        clients._http = httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(respond))
        await clients.run(0.5)
        return clients.attempts

    with asyncio.Runner(loop_factory=OwnTime) as runner:
        made = runner.run(load())
    others = [attempt for attempt in made if all(attempt is not other for other in streams)]
    assert streams
    assert others
    return streams, others


GOOD = json.dumps({"choices": [CHOICE]})


def test_whole_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for attempt in itertools.chain(*attempts(monkeypatch, WHOLE, GOOD, aborted=0)):
        assert (attempt.is_whole, attempt.has_left, attempt.error) == (True, False, "")


@pytest.mark.parametrize("stream", [PIECE, "", PIECE + "data: {", PIECE + "data: {}\n\n"])
@pytest.mark.parametrize("aborted", [0.0, 0.5])
def test_a_server_that_cuts_streams_off(stream: str, aborted: float, monkeypatch: pytest.MonkeyPatch) -> None:
    streams, _ = attempts(monkeypatch, stream, GOOD, aborted)
    assert all(attempt.error or attempt.has_left for attempt in streams)
    assert any(attempt.error for attempt in streams)
    assert not any(attempt.is_whole for attempt in streams)


@pytest.mark.parametrize("answer", ["{}", "", "[]", '{"choices": [{}]}'])
def test_a_server_whose_answers_are_none(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streams, others = attempts(monkeypatch, WHOLE, answer, aborted=0)
    assert any(attempt.request is not None for attempt in others)
    for attempt in others:
        assert attempt.error or (answer == '{"choices": [{}]}' and attempt.request is None)
    assert all(attempt.is_whole for attempt in streams)


def test_clients_that_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, _ = attempts(monkeypatch, None, GOOD, aborted=1)
    for attempt in streams:
        assert (attempt.is_whole, attempt.has_left, attempt.error) == (False, True, "")

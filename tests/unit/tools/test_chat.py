"""`gaudi-spec chat`: which text is a draft's, the conversation, and what is shown. tests/full_tests/test_live.py asks a
server."""

import io
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.http_server import Answers, answering, events
from tests.unit.tools.test_top import changed
from vllm_gaudi_spec.tools import cli
from vllm_gaudi_spec.tools.chat import DRAFT, REASONING, TARGET, UNKNOWN, Answer, Conversation, Piece, Screen
from vllm_gaudi_spec.tools.server import Server, ServerError

CHAT = "/v1/chat/completions"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def event(text: str, *tokens: str, finish_reason: str | None = None) -> dict[str, Any]:
    """As vLLM streams one with `return_token_ids` and `logprobs`."""
    entries = [{"token": token, "logprob": -0.5, "bytes": list(token.encode()), "top_logprobs": []} for token in tokens]
    choice = {"index": 0, "delta": {"content": text}, "logprobs": {"content": entries}, "finish_reason": finish_reason}
    return {"id": "chatcmpl-1", "choices": [{**choice, "token_ids": list(range(len(tokens)))}]}


START = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}]}
USAGE: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": 5}}
ANSWER = [
    START,
    event("One", "One"),
    event(" two three four", " two", " three", " four"),
    event("!", "!", "<|im_end|>", finish_reason="stop"),
    USAGE,
]
TEXT = "One two three four!"


# ---- pieces ----------------------------------------------------------------------------------------------


def reasoning(text: str, *tokens: int, content: str = "") -> dict[str, Any]:
    return {"choices": [{"delta": {"reasoning": text, "content": content}, "token_ids": list(tokens)}]}


PLAIN = [{"choices": [{"delta": {"content": text}}]} for text in ("One", " two")]
REPLACEMENT, FACE = "\N{REPLACEMENT CHARACTER}", "\N{GRINNING FACE}"


@pytest.mark.parametrize(
    ("k", "found", "pieces", "counts"),
    [
        # The end token, which is not shown, was the target's.
        (3, ANSWER, [("One", TARGET), (" two three", DRAFT), (" four", TARGET), ("!", DRAFT)], (6, 3, 0)),
        # More tokens than a step has.
        (
            1,
            [event("abc", "a", "b", "c"), event("de", "d", "e")],
            [("abc", UNKNOWN), ("d", DRAFT), ("e", TARGET)],
            (5, 1, 3),
        ),
        # A character of two tokens is held back until it is whole.
        (
            3,
            [event("x", "x", REPLACEMENT), event(f"{FACE}y", "", "y")],
            [("x", DRAFT), (FACE, DRAFT), ("y", TARGET)],
            (4, 2, 0),
        ),
        (3, [reasoning("Hm.", 1), event("Yes", "Yes")], [("Hm.", REASONING), ("Yes", TARGET)], (2, 0, 0)),
        # Where the reasoning of a step ends is unknown.
        (3, [reasoning(".", 1, 2, content="Yes")], [(".", REASONING), ("Yes", UNKNOWN)], (2, 0, 2)),
        (3, [event("", "<tool_call>", "{")], [], (2, 0, 2)),
        (0, PLAIN, [("One", TARGET), (" two", TARGET)], (0, 0, 0)),
    ],
)
def test_all_but_the_last_token_of_a_step_are_drafts(
    k: int, found: list[dict[str, Any]], pieces: list[tuple[str, str]], counts: tuple[int, int, int]
) -> None:
    answer = Answer(k)
    assert list(answer.read(found)) == [Piece(*piece) for piece in pieces]
    assert (answer.num_tokens, answer.num_drafts, answer.num_unknown) == counts
    assert answer.text == "".join(text for text, kind in pieces if kind != REASONING)


# ---- conversations ---------------------------------------------------------------------------------------


@pytest.fixture
def bodies() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def address(bodies: list[dict[str, Any]]) -> Iterator[str]:
    def answer(body: dict[str, Any]) -> tuple[int, str]:
        bodies.append(body)
        if len(body["messages"]) > 3:
            return 400, '{"error": {"message": "the conversation is too long"}}'
        return 200, events(*ANSWER)

    answers: Answers = {
        "/v1/models": lambda body: (200, '{"data": [{"id": "tiny"}, {"id": "other"}]}'),
        # Each answer has three accepted drafts.
        "/metrics": lambda body: (200, changed(num_accepted_tokens_total=100 + 3 * len(bodies))),
        CHAT: answer,
    }
    with answering(answers) as found:
        yield found


def conversation(address: str, k: int = 3) -> Conversation:
    return Conversation(Server(address), k, {"model": "tiny", "max_tokens": 9, "temperature": 0.5})


def test_a_conversation_grows(address: str, bodies: list[dict[str, Any]]) -> None:
    talk = conversation(address)
    found: list[Piece] = []
    answer = talk.ask("Count!", found.append)
    assert "".join(piece.text for piece in found) == answer.text == TEXT
    assert (answer.num_drafts, answer.num_accepted) == (3, 3)
    talk.ask("Again!", found.append)
    first = {"role": "user", "content": "Count!"}
    second = [first, {"role": "assistant", "content": TEXT}, {"role": "user", "content": "Again!"}]
    assert [body["messages"] for body in bodies] == [[first], second]
    options = {"model": "tiny", "max_tokens": 9, "temperature": 0.5, "stream": True}
    assert options.items() <= bodies[0].items()
    assert bodies[0]["return_token_ids"] is bodies[0]["logprobs"] is True
    with pytest.raises(ServerError, match=f"{CHAT}: the conversation is too long"):
        talk.ask("Once more!", found.append)
    talk.messages.clear()
    talk.ask("Count!", found.append)
    assert bodies[-1]["messages"] == [first]


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        ('data: {"error": {"message": "the engine died"}}\n\n', "the engine died"),
        (events(*ANSWER).removesuffix("data: [DONE]\n\n"), "stopped in the middle of an answer"),
        ("data: {broken\n\n", "sent an event that is not JSON"),
        (events({"error": {"message": "a\x1b[31mb"}}), "a\N{REPLACEMENT CHARACTER}\\[31mb"),
    ],
)
def test_streams_that_break(stream: str, words: str) -> None:
    with answering({CHAT: lambda body: (200, stream)}) as address, pytest.raises(ServerError, match=words):
        conversation(address).ask("Count!", lambda piece: None)


# ---- what is shown ---------------------------------------------------------------------------------------


def test_a_server_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    file = Terminal()
    screen = Screen(file)
    screen.begin("id\x1b]0;a\x07", 0)
    screen.show(Piece("a\x1b]0;title\x07\r\nb [bold] \u200d", TARGET))
    screen.end("length\x1b]0;end\x07")
    assert not re.search(r"\x1b\]|\x07|\r", file.getvalue())
    assert "b [bold] \u200d" in file.getvalue(), "brackets are not markup"


# ---- the command -----------------------------------------------------------------------------------------


def ask(monkeypatch: pytest.MonkeyPatch, text: str, *options: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return cli.main(["chat", *options])


def test_lines_of_a_pipe_are_messages(
    address: str, bodies: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(monkeypatch, "Count!\n\n Again!\n/clear\nCount!", address, "--max-tokens", "7") == 0
    assert capsys.readouterr().out == f"{TEXT}\n" * 3
    assert [len(body["messages"]) for body in bodies] == [1, 3, 1]
    assert bodies[1]["messages"][2]["content"] == "Again!"
    assert {(body["model"], body["max_tokens"], body["temperature"]) for body in bodies} == {("tiny", 7, 0)}
    assert ask(monkeypatch, "Count!", f"{address}/v1", "--model", "other", "--temperature", "0.7") == 0
    assert (bodies[-1]["model"], bodies[-1]["temperature"]) == ("other", 0.7)


def test_a_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Sent, not printed, and to no other address that the server leads to."""

    def models(headers: Any) -> tuple[int, str]:
        return (200, '{"data": [{"id": "tiny"}]}') if headers["Authorization"] == "Bearer secret" else (401, "{}")

    answers: Answers = {"/v1/models": lambda body: (200, ""), CHAT: lambda body: (200, events(*ANSWER))}
    with answering(answers, {"/v1/models": models}) as address:
        for key, words in (
            (None, "needs an API key, which gaudi-spec chat reads from OPENAI_API_KEY"),
            ("other", "the one in OPENAI_API_KEY is wrong"),
            ("sec\nret", "OPENAI_API_KEY has a character"),
        ):
            monkeypatch.delenv("OPENAI_API_KEY", raising=False)
            if key:
                monkeypatch.setenv("OPENAI_API_KEY", key)
            assert ask(monkeypatch, "Count!", address) == (2 if key == "sec\nret" else 1)
            shown = capsys.readouterr().err
            assert words in shown
            assert key is None or key not in shown
        monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
        assert ask(monkeypatch, "Count!", address) == 0
        assert capsys.readouterr().out == f"{TEXT}\n"

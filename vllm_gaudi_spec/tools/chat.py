"""`gaudi-spec chat`: a conversation with a running server, in which accepted drafts are shown in color.

A server sends all tokens of a step in one event: first the accepted drafts, and then the token that the target added.
All tokens of an event except the last are therefore drafts. docs/reference/command_line.md lists the exceptions.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple, TextIO

from vllm_gaudi_spec import environment
from vllm_gaudi_spec.tools.io.command_line import not_negative, positive
from vllm_gaudi_spec.tools.io.output import FINE, PROBLEMS, fail
from vllm_gaudi_spec.tools.server import DEFAULT_URL, Server, ServerError, make_printable

DESCRIPTION = """\
Talk to a running server. Answers are streamed, and on a terminal accepted drafts are green. The conversation so far is
sent with each message; /clear forgets it, Ctrl-C stops an answer, and Ctrl-D quits.

Examples:
  gaudi-spec chat
  echo "Why is the sky blue?" | gaudi-spec chat http://127.0.0.1:8000

green    accepted drafts: all tokens of a step except the last one
plain    the target's own token: the last one of each step
yellow   unknown: several steps came in one event, or a step ended the reasoning
dim      reasoning, if the server separates it

Colors are inferred, since the stream does not mark drafts. The line after each answer has the server's own count of
accepted drafts, which includes other requests. In a pipe, only the text is printed, and each line of the input is a
message.

The environment variable OPENAI_API_KEY has the key for a server with --api-key.

Exit status: 0 at the end of the conversation, 1 if the server does not answer, 2 for invalid options.
"""
_CLEAR = "/clear"
_INTERRUPTED = "interrupted"
TARGET, DRAFT, UNKNOWN, REASONING = "target", "draft", "unknown", "reasoning"
_STYLES = {DRAFT: "green", TARGET: "", UNKNOWN: "yellow", REASONING: "dim"}


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "chat", help="chat with a running server, with accepted drafts in color", description=DESCRIPTION
    )
    add = parser.add_argument
    add("url", nargs="?", default=DEFAULT_URL, metavar="URL", help="address of the server")
    add("--model", metavar="NAME", help="the model's name at the server (default: the server's first model)")
    add("--max-tokens", type=positive, default=512, metavar="N", help="maximum length of an answer, in tokens")
    add("--temperature", type=not_negative, default=0.0, metavar="T", help="sampling temperature; 0 is greedy")


def start(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    try:
        server = Server(options.url, environment.api_key())
    except ValueError as error:
        return fail("chat", str(error))
    try:
        talk(server, options)
    except ServerError as error:
        return fail("chat", str(error), PROBLEMS)
    return FINE


def talk(server: Server, options: argparse.Namespace) -> None:
    model = options.model or server.find_model()
    k, _ = read_counts(server)
    screen = Screen(sys.stdout)
    screen.begin(f"{model} at {server.base}", k)
    conversation = Conversation(
        server, k, {"model": model, "max_tokens": options.max_tokens, "temperature": options.temperature}
    )
    is_terminal = sys.stdin.isatty()
    for message in read_messages():
        if message == _CLEAR:
            conversation.messages.clear()
            continue
        started = time.monotonic()
        try:
            answer = conversation.ask(message, screen.show)
        except ServerError as error:
            if not is_terminal:
                raise
            print(f"error: {error}", file=sys.stderr)  # for example, /clear helps if the conversation is too long
            continue
        if answer.finish_reason == _INTERRUPTED and not is_terminal:
            raise KeyboardInterrupt
        screen.end(answer.summarize(time.monotonic() - started))


def read_messages() -> Iterator[str]:
    """Yield the input lines that are not blank."""
    if not sys.stdin.isatty():
        yield from filter(None, map(str.strip, sys.stdin))
        return
    import readline  # noqa: F401 - adds history and line editing to input()

    while True:
        try:
            message = input("> ").strip()
        except EOFError:
            print()
            return
        if message:
            yield message


def read_counts(server: Server) -> tuple[int, float | None]:
    """Return the maximum drafts per step and the server's number of accepted drafts, or 0 and None if unknown."""
    from vllm_gaudi_spec.tools.top import ACCEPTED, PER_POSITION, NotMetrics, Reading

    try:
        reading = Reading(server.read_metrics(), 0.0)
    except (ServerError, NotMetrics):  # the server is not a vLLM server, or it is busy
        return 0, None
    return len(reading.sum_by("position", PER_POSITION)), reading.sum(ACCEPTED)


class Piece(NamedTuple):
    text: str
    kind: str


class Answer:
    """A streamed answer, which is complete once all of its pieces have been read."""

    def __init__(self, k: int) -> None:
        """`k` is the maximum number of drafts per step, or 0 if it is unknown."""
        self.k = k
        self.text = self.finish_reason = ""
        self.num_tokens = self.num_drafts = self.num_unknown = 0
        self.num_accepted: float | None = None
        """Number of accepted drafts according to the server, which includes other requests, or None if unknown."""

    def read(self, events: Iterable[dict[str, Any]]) -> Iterator[Piece]:
        for event in events:
            for choice in event.get("choices", ()):
                yield from self._split(choice)

    def _split(self, choice: dict[str, Any]) -> Iterator[Piece]:
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        delta = choice.get("delta") or {}
        if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
            yield Piece(reasoning, REASONING)
        text = delta.get("content") or ""
        self.text += text
        num_tokens = len(choice.get("token_ids") or ())
        self.num_tokens += num_tokens
        # If reasoning ends inside a step, or if text is held back, it is not known which tokens are shown.
        is_divided = num_tokens > 1 and (reasoning or not text)
        if num_tokens > self.k + 1 or is_divided:
            self.num_unknown += num_tokens
            found = [Piece(text, UNKNOWN)]
        else:
            self.num_drafts += max(num_tokens - 1, 0)
            end = len(text) - _measure_last_token(choice, text) if num_tokens > 1 else 0
            found = [Piece(text[:end], DRAFT), Piece(text[end:], TARGET)]
        yield from (piece for piece in found if piece.text)

    def summarize(self, seconds: float) -> str:
        found = [f"{seconds:.1f} s"]
        if self.k:
            found.insert(0, f"{self.num_tokens} tokens")
            shown = f"{self.num_drafts} shown as accepted drafts"
            unknown = f", {self.num_unknown} unknown" if self.num_unknown else ""
            count = "'s count is unknown" if self.num_accepted is None else f" counted {self.num_accepted:.0f}"
            found.append(f"{shown}{unknown}; the server{count}")
        if self.finish_reason not in ("", "stop"):
            found.append(f"ended: {self.finish_reason}")
        return ", ".join(found)


def _measure_last_token(choice: dict[str, Any], text: str) -> int:
    """Return the length of the last token's text in its event, or 0 for an end token or a partial character."""
    entries = (choice.get("logprobs") or {}).get("content") or ()
    last = entries[-1]["token"] if entries else ""
    return len(last) if text.endswith(last) else 0


class Conversation:
    def __init__(self, server: Server, k: int, options: dict[str, Any]) -> None:
        self._server, self._k = server, k
        self._options = options | {"stream": True}
        if k:  # token IDs determine which tokens are drafts, and token texts determine where the drafts end
            self._options |= {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
        self.messages: list[dict[str, str]] = []

    def ask(self, message: str, show: Callable[[Piece], None]) -> Answer:
        """Send the message and show the answer. Both are added to the conversation unless the server returns an error.

        A KeyboardInterrupt stops the answer both in this process and on the server.
        """
        question = {"role": "user", "content": message}
        _, before = read_counts(self._server)
        answer = Answer(self._k)
        body = self._options | {"messages": [*self.messages, question]}
        with closing(self._server.stream("/v1/chat/completions", body)) as events:
            try:
                for piece in answer.read(events):
                    show(piece)
            except KeyboardInterrupt:
                answer.finish_reason = _INTERRUPTED
        _, after = read_counts(self._server)
        if before is not None and after is not None and after >= before:  # the count is lower after a server restart
            answer.num_accepted = after - before
        self.messages += [question, {"role": "assistant", "content": answer.text}]
        return answer


class Screen:
    """Prints the conversation, in color on a terminal and as plain text elsewhere."""

    def __init__(self, file: TextIO) -> None:
        from rich.console import Console

        self._file = file
        self._console = Console(file=file, highlight=False, soft_wrap=True) if file.isatty() else None

    def begin(self, title: str, k: int) -> None:
        self._print(f"{title}\n", "dim")
        if k == 0:
            self._print("The server exports no acceptance by position, so nothing is colored.\n", "dim")
            return
        self._print(f"k = {k}: ", "dim")
        for kind, meaning in ((DRAFT, "accepted drafts"), (TARGET, "the target's tokens"), (UNKNOWN, "unknown")):
            self._print(f"{meaning}  ", _STYLES[kind])
        self._print("\n", "")

    def show(self, piece: Piece) -> None:
        if self._console is None and piece.kind != REASONING:
            self._file.write(piece.text)
        self._print(piece.text, _STYLES[piece.kind])
        self._file.flush()

    def end(self, summary: str) -> None:
        if self._console is None:
            self._file.write("\n")
        self._print(f"\n{summary}\n", "dim")

    def _print(self, text: str, style: str) -> None:
        from rich.text import Text

        if self._console is not None:
            self._console.print(Text(make_printable(text), style), end="")
